"""Code that several packages share: command lines and errors, files and the disk cache, MXNet's import, NVIDIA's GPUs.
"""

import sys

# This check comes first: the code below it has syntax that an older Python cannot parse.
if not (3, 10) <= sys.version_info < (3, 15):
    sys.stderr.write("error: Python 3.10 to 3.14 is needed, and {} is {}.{}: run it with one of these, or run make "
                     "setup, which looks for one\n".format(sys.executable, *sys.version_info[:2]))
    raise SystemExit(2)
