"""What several packages need: command lines and errors, files and the cache on disk, MXNet's import, NVIDIA's GPUs."""

import sys

# Before anything that an older Python cannot read.
if not (3, 10) <= sys.version_info < (3, 15):
    sys.stderr.write("error: Python 3.10 to 3.14 is needed, and {} is {}.{}: run it with one of these, or run make "
                     "setup, which looks for one\n".format(sys.executable, *sys.version_info[:2]))
    raise SystemExit(2)
