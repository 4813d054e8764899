"""`python -m resnet_mxnet`: the console command, in the processes that our programs start."""

from resnet_mxnet.command import run

run()
