"""Sandboxes: a separate place for each rollout's program, and for untrusted Python."""

from rollouts.sandboxes.base import (
    Ability,
    Exit,
    RunningSandbox,
    Sandbox,
    SandboxError,
    SandboxLimits,
    opened,
    require_abilities,
)
from rollouts.sandboxes.containers import ContainerSandbox
from rollouts.sandboxes.containment import Containment
from rollouts.sandboxes.image import ImageSandbox
from rollouts.sandboxes.images import Image, build_image, load_image, named_image
from rollouts.sandboxes.namespaces import NamespaceSandbox
from rollouts.sandboxes.process import ProcessSandbox

__all__ = [
    "Ability",
    "ContainerSandbox",
    "Containment",
    "Exit",
    "Image",
    "ImageSandbox",
    "NamespaceSandbox",
    "ProcessSandbox",
    "RunningSandbox",
    "Sandbox",
    "SandboxError",
    "SandboxLimits",
    "build_image",
    "load_image",
    "named_image",
    "opened",
    "require_abilities",
]
