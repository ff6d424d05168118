"""NVFlare's process of a site, which Ctrl-C ends: `python -m sfvi.deploy.nvflare.process MODULE ...`.

Python would turn Ctrl-C into an exception in one of NVFlare's threads, and the others would go on. A site may end at
any moment: what it must remember is on its disk.
"""

import runpy
import signal
import sys

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
