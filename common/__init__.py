"""What several packages need: command lines and errors, files and the cache on disk, MXNet's import, NVIDIA's GPUs."""

import sys

# The first line of ours that any program runs; what follows cannot be read by an older Python.
if not (3, 10) <= sys.version_info < (3, 15):
    sys.stderr.write("error: Python 3.10 to 3.14 is needed, and {} is {}.{}: call the program with another one, or let "
                     "make setup find it\n".format(sys.executable, *sys.version_info[:2]))
    raise SystemExit(2)
