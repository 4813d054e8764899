# NVIDIA DGX A100 (8 A100, 40 or 80 GB); scripts/dgx1_8gpu.sh -p dgx_a100 --config resnet50_90ep --data ...
#
# Not measured here: this project has been developed and measured on H200 only.
#
# Batch: 256 in fp16, as NVIDIA's MXNet example has it for 80 GB (DeepLearningExamples, MxNet/Classification/RN50v1.5,
# which states 16,925 images/sec on 8 GPUs, 7.8 times one GPU, and 77.2 % top-1 after 90 epochs in 1.8 hours).
# On an H200 a batch of 256 takes 10.6 GiB (benchmarks/results/memory_1gpu.jsonl), so it fits into 40 GB too.
platform_options=(-b 256)
