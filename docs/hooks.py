"""What the site needs beside the pages in this folder: results, the tutorial, the command line and formulas."""

import base64
import html
import json
import re
from pathlib import Path

import latex2mathml.converter
import typer.main
from click import Context, Group
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
ELSEWHERE = (
    *("CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/*.md", "benchmarks/*.png"),
    *("experiments/README.md", "experiments/*/*.md", "experiments/*/*.png", "experiments/*/results.json"),
)
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_files(files, config):
    """Add what lies outside of this folder, under its own path, and the tutorial."""
    for pattern in ELSEWHERE:
        for path in sorted(ROOT.glob(pattern)):
            uri = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, uri, abs_src_path=str(path)))
    for uri, content in tutorial(ROOT / "docs" / "tutorial.ipynb"):
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown, page, config, files):
    """Let links that hold in the repository hold in the site, and write the commands down."""
    del config, files
    markdown = re.sub(r"\]\(\.\./(?=benchmarks/|experiments/|[A-Z]+\.md)", "](", markdown)
    markdown = markdown.replace("](tutorial.ipynb)", "](tutorial.md)")
    if page.file.src_uri == "CONTRIBUTING.md":
        markdown = markdown.replace("](docs/", "](")
    return markdown.replace("<!-- commands -->", commands()) if page.file.src_uri == "cli.md" else markdown


def on_page_content(content, page, config, files):
    """Turn formulas into MathML, which browsers show by themselves."""
    del page, config, files
    return FORMULA.sub(mathml, content)


def mathml(match):
    """One formula."""
    display = "block" if match[1] == "div" else "inline"
    latex = re.sub(r"\\mathrm\{(\w)\}", r"\\text{\1}", html.unescape(match[2]).strip())  # one letter would be slanted
    latex = re.sub(r"\\(log|max|exp) +(?=\S)", r"\\\1\\,", latex)
    return latex2mathml.converter.convert(latex, display=display)


def commands():
    """The command line as its own help has it."""
    from sfvi.cli import app

    return "\n".join(described(typer.main.get_command(app), "sfvi", None))


def described(command, name, parent):
    """A command and those below it, as Markdown."""
    context = Context(command, info_name=name, parent=parent)
    if isinstance(command, Group):
        for below in command.list_commands(context):
            yield from described(command.get_command(context, below), below, context)
        return
    yield f"\n## {context.command_path}\n\n{command.help}\n\n| | |\n|---|---|"
    for param in command.params:
        if param.name == "help":
            continue
        shown = ", ".join(param.opts) if param.param_type_name == "option" else param.name.upper()
        needed = " Required." if param.required else ""
        known = param.default not in (None, False, (), []) and not callable(param.default) and not param.required
        default = f" By default `{param.default}`." if known else ""
        said = (param.help or "").strip().replace("|", "\\|")
        yield f"| `{shown}` | {said}{'' if said.endswith('.') else '.'}{needed}{default} |"


def tutorial(path):
    """The notebook as a page, and its pictures."""
    lines = []
    for number, cell in enumerate(json.loads(path.read_text())["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            lines.append(source)
            continue
        lines.append(f"```python\n{source}\n```")
        for position, output in enumerate(cell["outputs"]):
            data = output.get("data", {"text/plain": output.get("text", "")})
            if "image/png" in data:
                name = f"tutorial-{number}-{position}.png"
                yield name, base64.b64decode("".join(data["image/png"]))
                lines.append(f"![]({name})")
            else:
                lines.append(f"```text\n{''.join(data['text/plain']).rstrip()}\n```")
    yield "tutorial.md", "\n\n".join(lines)
