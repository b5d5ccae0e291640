"""A reward of your own: a function of the images (uint8 [n, H, W, 3], RGB, read-only), the prompts and their metadata."""


def contrast(images, prompts, metadata, *, target=127.5):
    """Standard deviation of the grey values over `target`: 0 on a flat image, 1 if half is black and half is white."""
    grey = images.mean(axis=3).reshape(len(images), -1)
    return (grey.std(axis=1) / target).clip(0, 1)
