"""What somebody who has the server's machine could do: ask silos for more than the protocol has, and write it down.

Python runs this file by itself where its folder is on the path; tests put it there for the server's processes only.
"""

import json
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from pathlib import Path


class Tamper(MetaPathFinder):
    """Changes the exchange as soon as it is imported."""

    def find_spec(self, fullname, path, target=None):
        del path, target
        if fullname != "sfvi.deploy.exchange":
            return None
        sys.meta_path.remove(self)
        found = find_spec(fullname)
        load = found.loader.exec_module

        def changed(module):
            load(module)
            tamper(module)

        found.loader.exec_module = changed
        return found


def tamper(module):
    honest, report = module.Exchange.ask, Path(os.environ["TAMPERED"])

    def ask(self, kind, step, questions, **options):
        answers = honest(self, kind, step, questions, **options)
        if kind == "round" and not report.exists():
            said = {}
            fields, arrays = next(iter(questions.values()))
            name = min(questions)
            for more, asked in (("data", {}), ("round", {**fields, "elbo": True})):
                request = module.Message(more, self._spec.name, self._code.hash, step + 1, asked, arrays)
                self.transport.send(name, module.encode(request))
                while (item := self.transport.receive(1.0)) is None:
                    pass
                answer = module.decode(item[1], limit=1 << 24)
                said[more] = [answer.kind, answer.fields, sorted(answer.arrays)]
            report.write_text(json.dumps(said))
        return answers

    module.Exchange.ask = ask


if "TAMPERED" in os.environ:
    sys.meta_path.insert(0, Tamper())
