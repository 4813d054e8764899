# NVIDIA DGX-1 with 8 V100 (16 GB); scripts/dgx1_8gpu.sh -p dgx1_v100 --config resnet50_90ep --data ...
#
# Not measured here: this project has been developed and measured on H200 only. cuDNN 9's newest releases and CUDA 13 have
# left Volta behind, so it needs their CUDA 12 builds.
#
# Batch: 192 in fp16, as NVIDIA's MXNet example has it for 16 GB (DeepLearningExamples, MxNet/Classification/RN50v1.5,
# which states 10,723 images/sec on 8 GPUs, 7.8 times one GPU, and 77.2 % top-1 after 90 epochs in 3.0 hours).
platform_options=(-b 192)
