"""Real image processors, built from their classes and a real tokenizer with the special tokens of the family.

Without torchvision, transformers loads no processor that has a part for videos. That part is left out here. The part
for images is the code of the family with the parameters of its models, smaller where that changes no rule.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import PIL.Image

from rollouts.dtypes import Image

CHATML = """{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}{{- message.content -}}{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{- 'PLACEHOLDER' -}}{%- else -%}{{- part.text -}}{%- endif -%}
{%- endfor -%}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
"""A template that writes PLACEHOLDER for an image."""

_QWEN = "<|vision_start|><|image_pad|><|vision_end|>"


@attrs.frozen
class Family:
    """How the processor of a family is built."""

    processor: str
    image_processor: str
    options: dict[str, Any] = attrs.field(factory=dict)
    written: str = _QWEN
    """What the chat template writes for an image."""
    special: dict[str, str] = attrs.field(factory=dict)
    """Special tokens of the family that the tokenizer lacks, by the name of the tokenizer's attribute."""
    videos: bool = True
    """Whether the processor has a part for videos, which is left out."""


FAMILIES: dict[str, Family] = {
    "qwen2_5_vl": Family(
        "qwen2_5_vl.processing_qwen2_5_vl.Qwen2_5_VLProcessor",
        "qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil",
        {"size": {"shortest_edge": 3136, "longest_edge": 50176}},
    ),
    "qwen3_vl": Family(
        "qwen3_vl.processing_qwen3_vl.Qwen3VLProcessor",
        "qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil",
        {
            "patch_size": 16,
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
            "size": {"shortest_edge": 4096, "longest_edge": 65536},
        },
    ),
    "gemma3": Family(
        "gemma3.processing_gemma3.Gemma3Processor",
        "gemma3.image_processing_pil_gemma3.Gemma3ImageProcessorPil",
        written="<start_of_image>",
        special={"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        videos=False,
    ),
    "internvl": Family(
        "internvl.processing_internvl.InternVLProcessor",
        "got_ocr2.image_processing_pil_got_ocr2.GotOcr2ImageProcessorPil",
        {"min_patches": 1, "max_patches": 2, "size": {"height": 56, "width": 56}},
        written="<IMG_CONTEXT>\n",
        special={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
    ),
    "glm4v": Family(
        "glm4v.processing_glm4v.Glm4vProcessor",
        "glm4v.image_processing_pil_glm4v.Glm4vImageProcessorPil",
        {"size": {"shortest_edge": 12544, "longest_edge": 100352}},
        written="<|begin_of_image|><|image|><|end_of_image|>",
        special={"image_token": "<|image|>", "video_token": "<|video|>"},
    ),
}


def _class(path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(f"transformers.models.{module}"), name)
    except ModuleNotFoundError:  # transformers 5.3 has the one without torch under the plain name
        if "_pil_" not in module:
            raise
        return _class(f"{module.replace('_pil', '')}.{name.removesuffix('Pil')}")


def _without_videos(cls: Any) -> Any:
    class OnlyImages(cls):  # type: ignore[misc]
        def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None) -> None:
            super().__init__(image_processor, tokenizer, None, chat_template=chat_template)

    return OnlyImages


def load_tokenizer_of(family: Family, folder: str) -> Any:
    """A tokenizer with the special tokens of a family."""
    return _load_tokenizer(folder, tuple(family.special.items()))


@functools.cache
def _load_tokenizer(folder: str, special: tuple[tuple[str, str], ...]) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, extra_special_tokens=dict(special))


def build_processor(family: Family, tokenizer: Any) -> Any:
    """The processor of a family, without its part for videos."""
    cls = _class(family.processor)
    return (_without_videos(cls) if family.videos else cls)(_class(family.image_processor)(**family.options), tokenizer)


def picture(width: int, height: int, seed: int = 0) -> Image:
    """An image of noise, different for each seed."""
    noise = np.random.default_rng([width, height, seed]).integers(0, 256, (height, width, 3), np.uint8)
    return Image.of(PIL.Image.fromarray(noise))


def own_text(tokenizer: Any, template: str, messages: Sequence[Any], **options: Any) -> str:
    """The text that transformers itself renders for messages with images."""
    chats = []
    for message in messages:
        chat = message.to_chat()
        if message.images:
            chat["content"] = [
                {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
                for part in message.content
            ]
        chats.append(chat)
    text = tokenizer.apply_chat_template(
        chats, chat_template=template, tokenize=False, add_generation_prompt=True, **options
    )
    return str(text)


def own_output(processor: Any, text: str, images: Sequence[Image]) -> tuple[list[int], dict[str, Any]]:
    """The ids and the other outputs that a processor itself gives for a whole text, as slime reads them."""
    output = processor(
        text=text,
        images=[image.to_pil() for image in images] or None,
        text_kwargs={"return_tensors": None, "add_special_tokens": False, "return_mm_token_type_ids": False},
        images_kwargs={"return_tensors": "pt"},
    )
    ids = output["input_ids"]
    others = {name: value for name, value in output.items() if name not in ("input_ids", "attention_mask")}
    return [int(token) for token in (ids[0] if isinstance(ids[0], list) else ids)], others
