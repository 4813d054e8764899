# All that the project needs, for machines with or without NVIDIA GPUs: docs/setup.md says how to use it.
#
#   docker build -t resnet .                               # CPU
#   docker build -t resnet --build-arg SETUP_FOR=gpu .     # NVIDIA GPUs; the machine that builds needs none

# Debian 12 for its Python 3.11, with which MXNet runs on the NumPy that it was made for; Debian 13 (trixie) works too.
FROM debian:bookworm-slim AS build
# hadolint ignore=DL3008
RUN apt-get update && \
    apt-get install -y --no-install-recommends g++ make python3-venv && \
    rm -rf /var/lib/apt/lists/*
WORKDIR /resnet
# What the set-up reads, alone: it is repeated when that changes, and not with every other file.
COPY LICENSE Makefile README.md pyproject.toml ./
COPY common common
COPY gpu_report/__init__.py gpu_report/
COPY graph_passes/__init__.py graph_passes/
COPY pipelines/__init__.py pipelines/
COPY resnet_mxnet/__init__.py resnet_mxnet/
COPY scripts scripts
COPY train/__init__.py train/
COPY train/processes/allreduce.cc train/processes/
ARG SETUP_FOR=cpu
RUN SETUP_FOR=$SETUP_FOR PIP_NO_CACHE_DIR=1 make setup && rm -rf .venv/horovod

FROM debian:bookworm-slim
# hadolint ignore=DL3008
RUN apt-get update && \
    apt-get install -y --no-install-recommends libgomp1 libquadmath0 make python3-venv && \
    rm -rf /var/lib/apt/lists/* && \
    useradd --uid 1000 --create-home resnet
WORKDIR /resnet
COPY --from=build /resnet/.venv .venv
COPY . .
# For reports: docker build --build-arg COMMIT=$(git rev-parse HEAD)
ARG COMMIT
RUN if [ -n "$COMMIT" ]; then echo "node: $COMMIT" >.git_archival.txt; fi && \
    chmod 1777 .
# Any user may run it, and write runs, samples and caches here: `docker run --user "$(id -u):$(id -g)"`.
ENV PATH=/resnet/.venv/bin:$PATH HOME=/tmp NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility,video
USER 1000
CMD ["make", "train-1gpu"]
