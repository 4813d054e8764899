"""The public face of this project: the console command `resnet-mxnet` (command.py)."""
