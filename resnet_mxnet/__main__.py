"""`python -m resnet_mxnet`: the console command, as our programs start it in new processes."""

from resnet_mxnet.command import run

run()
