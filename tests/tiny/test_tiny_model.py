import numpy as np
import pytest
import torch
from diffusers import StableDiffusion3Pipeline

from flowgrpo_ray.tiny import model_dir
from flowgrpo_ray.tiny.build_model import paint
from flowgrpo_ray.tiny.networks import load, vocabulary

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def pipe():
    pipe = StableDiffusion3Pipeline.from_pretrained(
        model_dir(), text_encoder_3=None, tokenizer_3=None, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_size():
    assert sum(file.stat().st_size for file in model_dir().rglob("*") if file.is_file()) <= 12e6


def test_no_paths_of_the_machine_that_made_it():
    for file in model_dir().rglob("*.json"):
        assert "_name_or_path" not in file.read_text(), file


def test_stock_pipeline_makes_an_image(pipe):
    image = pipe('the word "CAT"', height=32, width=64, num_inference_steps=8, guidance_scale=1.0,
                 max_sequence_length=1, generator=torch.Generator().manual_seed(0)).images[0]
    assert image.size == (64, 32)
    pixels = np.asarray(image)
    assert pixels.max() > 200 and pixels.min() < 80  # paper and ink, not a grey mush


def test_configuration_that_the_demo_relies_on(pipe):
    assert pipe.scheduler.config.shift == 1.0 and not pipe.scheduler.config.use_dynamic_shifting
    assert pipe.vae.config.shift_factor is not None  # diffusers' SD3 decode cannot do without
    assert pipe.vae_scale_factor == 4 and pipe.transformer.config.patch_size == 2
    assert pipe.text_encoder_3 is None


def test_caption_becomes_characters(pipe):
    assert pipe.tokenizer.get_vocab() == vocabulary() == pipe.tokenizer_2.get_vocab()
    tokens = pipe.tokenizer.convert_ids_to_tokens(pipe.tokenizer('the word "CAT"').input_ids)
    assert tokens == ["<|startoftext|>", "t", "h", "e</w>", "w", "o", "r", "d</w>", '"</w>', "c", "a", "t</w>", '"</w>',
                      "<|endoftext|>"]
    longest = pipe.tokenizer('the word "CATS"').input_ids
    assert len(longest) <= pipe.tokenizer.model_max_length


def test_images_follow_seed_and_word():
    pipe = load(model_dir())

    def image(word, seed):
        return paint(pipe, [f'the word "{word}"'], torch.Generator().manual_seed(seed))

    assert np.array_equal(image("CAT", 0), image("CAT", 0))
    assert not np.array_equal(image("CAT", 0), image("CAT", 1))
    assert not np.array_equal(image("CAT", 0), image("DOG", 0))
