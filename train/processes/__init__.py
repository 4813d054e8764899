"""The processes of a run: starting them on one or several machines, handling losses, averaging gradients.

In the launcher, which starts the processes:

    launch, multi_host          the programs: for one machine; for several machines, through horovodrun
    topology                    the GPUs and cores of this machine, and each process's share
    worker                      the processes on this machine: start, signals, and exit codes
    watch                       finds the process that hangs
    guard                       a separate process that ends the others if the launcher is killed
    elastic_launch              the launcher of an elastic run on one machine

In each process:

    distributed, allreduce communication with the other processes, mostly of gradients pulse the state that the process
    shows the launcher, which `watch` reads elastic the sessions of an elastic run; a new one begins after each loss
    horovod_mxnet Horovod's import

In both:

    signals                     signals that request saving and stopping; the end of a process that does not respond
    invocation                  the command that started the run
"""
