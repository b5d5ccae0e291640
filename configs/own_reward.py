"""A reward of one's own: a function of the images (uint8 [n, H, W, 3], RGB, read-only), the prompts and their metadata."""


def contrast(images, prompts, metadata, *, target=60.0):
    """1 where the standard deviation of the grey values is `target` or more, falling to 0 on a flat image."""
    grey = images.mean(axis=3).reshape(len(images), -1)
    return (grey.std(axis=1) / target).clip(0, 1)
