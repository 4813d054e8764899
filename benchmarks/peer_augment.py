"""Augmentations of PyTorch's side on the GPU: torchvision's operations, applied to a whole batch at once.

torchvision's transforms v2 draw once for all images of a batch. So each image must go through them alone, on the CPU,
in the workers of a DataLoader. This module has the operations and magnitudes of torchvision.transforms.v2's
TrivialAugmentWide and RandomErasing, but draws for each image, in tensor operations that torch.compile fuses. So the
peer is not slowed down by its CPU. tests/test_peers.py compares the results with torchvision's, pixel by pixel.

Images are (N, 3, H, W) float32 with whole grey levels from 0 to 255, as torchvision's operations on uint8 return them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

BINS = 31  # number of magnitudes
# In the order of torchvision's table: the magnitudes, and whether their sign is random. Posterize's magnitudes are the
# bits that stay, Solarize's are the threshold as a fraction of white.
NONE = torch.zeros(BINS)
OPERATIONS: dict[str, tuple[torch.Tensor, bool]] = {
    "Identity": (NONE, False),
    **dict.fromkeys(("ShearX", "ShearY"), (torch.linspace(0.0, 0.99, BINS), True)),
    **dict.fromkeys(("TranslateX", "TranslateY"), (torch.linspace(0.0, 32.0, BINS), True)),
    "Rotate": (torch.linspace(0.0, 135.0, BINS), True),
    **dict.fromkeys(("Brightness", "Color", "Contrast", "Sharpness"), (torch.linspace(0.0, 0.99, BINS), True)),
    "Posterize": ((8 - torch.arange(BINS) / ((BINS - 1) / 6)).round(), False),
    "Solarize": (torch.linspace(1.0, 0.0, BINS), False),
    "AutoContrast": (NONE, False),
    "Equalize": (NONE, False),
}
NUMBER = {name: number for number, name in enumerate(OPERATIONS)}
GREY = (0.2989, 0.587, 0.114)
MAX_TRIES = 10  # rectangles drawn until one fits, as in torchvision


def draw_trivial_augment(count: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw the operation (N,) and the signed magnitude (N,) of each image."""
    magnitudes = torch.stack([of_one for of_one, _ in OPERATIONS.values()]).to(device)
    signed = torch.tensor([of_one for _, of_one in OPERATIONS.values()], device=device)
    operation = torch.randint(len(OPERATIONS), (count,), device=device)
    magnitude = magnitudes[operation, torch.randint(BINS, (count,), device=device)]
    negative = signed[operation] & (torch.rand(count, device=device) < 0.5)
    return operation, torch.where(negative, -magnitude, magnitude)


def trivial_augment(images: torch.Tensor, operation: torch.Tensor, magnitude: torch.Tensor) -> torch.Tensor:
    """Apply to each image its operation."""
    number, by = operation[:, None, None, None], magnitude[:, None, None, None]
    moved = _affine(images, operation, magnitude)
    grey = (images * torch.tensor(GREY, device=images.device)[:, None, None]).sum(1, keepdim=True).floor()
    other = torch.where(number == NUMBER["Color"], grey, torch.zeros_like(grey)).expand_as(images)
    other = torch.where(number == NUMBER["Contrast"], grey.mean((1, 2, 3), keepdim=True), other)
    blends = (number >= NUMBER["Brightness"]) & (number <= NUMBER["Sharpness"])
    # The order of operations is torchvision's: another order could give just less than a whole level, and lose one.
    blended = torch.where(number == NUMBER["Sharpness"], images + (_smoothed(images) - images) * -by,
                          images * (1 + by) + other * -by).clamp(0, 255).floor()
    result = torch.where(blends, blended, moved)
    step = torch.exp2(8 - by.clamp(0, 8))  # distance between the remaining grey levels
    result = torch.where(number == NUMBER["Posterize"], (images / step).floor() * step, result)
    inverted = torch.where(images >= 255 * by, 255 - images, images)
    result = torch.where(number == NUMBER["Solarize"], inverted, result)
    result = torch.where(number == NUMBER["AutoContrast"], _stretched(images), result)
    return torch.where(number == NUMBER["Equalize"], _equalized(images), result)


def _affine(images: torch.Tensor, operation: torch.Tensor, magnitude: torch.Tensor) -> torch.Tensor:
    """Shear, translate or rotate images (nearest neighbour, black outside); images with other operations stay equal."""
    height, width = images.shape[2:]

    def only(name: str, value: torch.Tensor) -> torch.Tensor:
        return torch.where(operation == NUMBER[name], value, torch.zeros_like(value))[:, None, None]

    x = (torch.arange(width, device=images.device) + 0.5).expand(height, width)
    y = (torch.arange(height, device=images.device) + 0.5)[:, None].expand(height, width)
    angle = only("Rotate", torch.deg2rad(magnitude))
    u, v = x - width / 2, y - height / 2
    from_x = angle.cos() * u - angle.sin() * v + width / 2
    from_y = angle.sin() * u + angle.cos() * v + height / 2
    from_x = from_x + only("ShearX", magnitude) * y - only("TranslateX", magnitude.trunc())
    from_y = from_y + only("ShearY", magnitude) * x - only("TranslateY", magnitude.trunc())
    column, row = (from_x - 0.5).round().long(), (from_y - 0.5).round().long()
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    index = (row.clamp(0, height - 1) * width + column.clamp(0, width - 1)).flatten(1)
    taken = images.flatten(2).gather(2, index[:, None].expand(-1, 3, -1)).view_as(images)
    return torch.where(inside[:, None], taken, torch.zeros_like(taken))


def _smoothed(images: torch.Tensor) -> torch.Tensor:
    """The smoothed images that the sharpness operation blends with: whole grey levels; the border stays as it is."""
    kernel = torch.ones(3, 1, 3, 3, device=images.device)
    kernel[:, :, 1, 1] = 5
    inner = (F.conv2d(images, kernel, groups=3) / 13).round()
    inside = F.pad(torch.ones_like(inner, dtype=torch.bool), (1, 1, 1, 1))
    return torch.where(inside, F.pad(inner, (1, 1, 1, 1)), images)


def _stretched(images: torch.Tensor) -> torch.Tensor:
    """Stretch each channel to 0 to 255."""
    low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    stretched = ((images - low) / ((high - low).clamp(min=1) / 255)).clamp(0, 255).floor()
    return torch.where(high == low, images, stretched)


def _equalized(images: torch.Tensor) -> torch.Tensor:
    """Equalize the histogram of each channel."""
    flat = images.flatten(2).long()
    counts = torch.zeros(*flat.shape[:2], 256, device=images.device, dtype=torch.int32)
    counts = counts.scatter_add(2, flat, torch.ones_like(flat, dtype=torch.int32))
    last = counts.gather(2, flat.amax(2, keepdim=True))
    step = (flat.shape[2] - last) // 255
    before = counts.cumsum(2) - counts
    table = ((before + step // 2) // step.clamp(min=1)).clamp(0, 255)
    equalized = table.gather(2, flat).view(images.shape).to(images.dtype)
    return torch.where(step[..., None] == 0, images, equalized)


def draw_rectangles(count: int, probability: float, height: int, width: int, device: str) -> torch.Tensor:
    """Draw the rectangle to erase in each image: left, top, right, bottom in pixels, (N, 4); all 0 to erase none.

    Scale and ratio are torchvision's: 0.02 to 0.33 of the area, 0.3 to 3.3.
    """
    area = height * width * torch.empty(count, MAX_TRIES, device=device).uniform_(0.02, 0.33)
    ratio = torch.empty(count, MAX_TRIES, device=device).uniform_(*torch.log(torch.tensor([0.3, 3.3])).tolist()).exp()
    tall, wide = (area * ratio).sqrt().round(), (area / ratio).sqrt().round()
    fits = (tall < height) & (wide < width)
    first = fits.int().argmax(1, keepdim=True)
    tall, wide = (sides.gather(1, first)[:, 0] for sides in (tall, wide))
    top, left = ((torch.rand(count, device=device) * (full - side + 1)).floor()
                 for full, side in ((height, tall), (width, wide)))
    erased = fits.any(1) & (torch.rand(count, device=device) < probability)
    return torch.stack([left, top, left + wide, top + tall], 1) * erased[:, None]


def inside(rectangles: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Whether each pixel lies in its image's rectangle (N, 4: left, top, right, bottom): (N, 1, H, W) bool."""
    left, top, right, bottom = rectangles.unbind(1)
    x, y = (torch.arange(side, device=rectangles.device) for side in (width, height))
    in_x, in_y = (x >= left[:, None]) & (x < right[:, None]), (y >= top[:, None]) & (y < bottom[:, None])
    return (in_y[:, :, None] & in_x[:, None, :])[:, None]
