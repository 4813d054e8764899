# NVIDIA DGX H100 or H200 (8 H100 with 80 GB or H200 with 141 GB); scripts/dgx1_8gpu.sh -p dgx_h100 --config ... --data ...
#
# Measured here on H200: one GPU at batch 256 (benchmarks/results/resnet50_fp16_b256_synthetic_1gpu.json) and at other
# batches (docs/cuda_executor.md); four GPUs at batch 256 (docs/multi_gpu.md). H100 is not measured here.
#
# Batch: 400 in fp16, NVIDIA's for one such machine in MLPerf Training 4.0 (8 H200, real data: 63,600 images/sec). That
# round trains with LARS; with SGD, 8 x 400 images a step need a warm-up of 5 epochs (Goyal et al., arXiv:1706.02677).
platform_options=(-b 400)
