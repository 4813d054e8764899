"""The processes of a run: starting them, on one machine and on several; losing them; averaging their gradients.

In the launcher, which starts them:

    launch, multi_host          the programs: of one machine; of several, by way of horovodrun
    topology                    the GPUs and cores of this machine, and each process's share
    worker                      the processes on this machine: start, signals, and how they end
    watch                       which of them hangs
    guard                       a process of its own that ends them where the launcher is killed
    elastic_launch              the launcher of an elastic run on one machine

In each process:

    distributed, allreduce      what it does together with the others, gradients above all
    pulse                       what it shows the launcher of what it does, which `watch` reads
    elastic                     its sessions, of which each loss begins another
    horovod_mxnet               Horovod's import

In both:

    signals                     what asks to save and stop, and what ends a process that does not listen
    invocation                  the command by which all this was started
"""
