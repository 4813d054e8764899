"""PyTorch's side of lite_accuracy.py, which starts it: the scores of photographs, in fp32.

    python benchmarks/peer_lite.py PACKAGES efficientnet-lite0 WEIGHTS.pth PHOTOGRAPHS.txt SCORES.npy

PACKAGES holds the package efficientnet_lite_pytorch, whose network reads the weights. Each line of PHOTOGRAPHS.txt is
a photograph, which Pillow prepares as TensorFlow's efficientnet/preprocessing.py does: the shorter side is resized to
the network's size and 32 pixels more, bicubic, and the middle is cut out. Pixels become (pixel - 127) / 128
(efficientnet_lite_builder.py). Writes the scores (N, 1,000), and prints the versions of the libraries as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import PIL
import torch
from PIL import Image

MARGIN, BATCH = 32, 30  # pixels; images


def prepared(path: str, size: int) -> np.ndarray:
    """The network's input (3, size, size), float32."""
    with Image.open(path) as image:
        rgb = image.convert("RGB")
    scale = (size + MARGIN) / min(rgb.size)
    rgb = rgb.resize([round(side * scale) for side in rgb.size], Image.Resampling.BICUBIC)
    left, top = ((side - size) // 2 for side in rgb.size)
    pixels = np.asarray(rgb.crop((left, top, left + size, top + size)), np.float32)
    return ((pixels - 127) / 128).transpose(2, 0, 1)


@torch.no_grad()
def main(packages: str, name: str, weights: str, listing: str, scores: str) -> None:
    sys.path.insert(0, packages)
    from efficientnet_lite_pytorch import EfficientNet

    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    device = "cuda" if torch.cuda.is_available() else "cpu"
    network = EfficientNet.from_name(name)
    network.load_state_dict(torch.load(weights, weights_only=True), strict=True)
    network.eval().to(device)
    size, paths, found = EfficientNet.get_image_size(name), Path(listing).read_text().splitlines(), []
    for start in range(0, len(paths), BATCH):
        images = np.stack([prepared(path, size) for path in paths[start : start + BATCH]])
        found.append(network(torch.from_numpy(images).to(device)).cpu().numpy())
    np.save(scores, np.concatenate(found))
    print(json.dumps({"torch": torch.__version__, "pillow": PIL.__version__}))


if __name__ == "__main__":
    main(*sys.argv[1:])
