"""Conversion between messages and tokens with the tokenizer's chat template: openings, bridges, parsing, self-test."""

from typing import TYPE_CHECKING

from rollouts.base.lazy_face import lazy_face

if TYPE_CHECKING:
    from rollouts.renderer.bridge import STRATEGIES
    from rollouts.renderer.call_check import CallCheck
    from rollouts.renderer.example import ExamplePart, conversation, speak
    from rollouts.renderer.memory import BridgeMemory
    from rollouts.renderer.options import RendererOptions, with_prompt_options
    from rollouts.renderer.renderer import Renderer, renderer_for
    from rollouts.renderer.selftest import SelfTest, Step
    from rollouts.renderer.special_text import SpecialText
    from rollouts.renderer.tokenizer import load_tokenizer

__all__ = [
    "STRATEGIES",
    "BridgeMemory",
    "CallCheck",
    "ExamplePart",
    "Renderer",
    "RendererOptions",
    "SelfTest",
    "SpecialText",
    "Step",
    "conversation",
    "load_tokenizer",
    "renderer_for",
    "speak",
    "with_prompt_options",
]

__getattr__, __dir__ = lazy_face(
    __name__,
    {
        "rollouts.renderer.bridge": ("STRATEGIES",),
        "rollouts.renderer.call_check": ("CallCheck",),
        "rollouts.renderer.example": ("ExamplePart", "conversation", "speak"),
        "rollouts.renderer.memory": ("BridgeMemory",),
        "rollouts.renderer.options": ("RendererOptions", "with_prompt_options"),
        "rollouts.renderer.renderer": ("Renderer", "renderer_for"),
        "rollouts.renderer.selftest": ("SelfTest", "Step"),
        "rollouts.renderer.special_text": ("SpecialText",),
        "rollouts.renderer.tokenizer": ("load_tokenizer",),
    },
)
