"""Loading a drafter, strictly: a tensor missing, unexpected or of the wrong shape fails the load by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mtp_extract.drafter.config import LITERT_CONFIG, TRANSFORMERS_CONFIG, DrafterConfig, read_json_config
from mtp_extract.drafter.mtp import Drafter
from mtp_extract.errors import DrafterError, escape
from mtp_extract.graph.roles import roles_of

__all__ = ["build_drafter", "load_drafter"]

_WEIGHTS = {LITERT_CONFIG: "mtp_drafter.safetensors", TRANSFORMERS_CONFIG: "model.safetensors"}
_DTYPES = (torch.float32, torch.bfloat16)

# The centroid head, which LiteRT's drafters do not have and the role table therefore does not list.
_ORDERED_HEAD = {
    "ordered_head.centroids.weight": "masked_embedding.centroids.weight",
    "ordered_head.token_ordering": "masked_embedding.token_ordering",
}


@dataclass(frozen=True)
class _Layout:
    """Where each module path of the drafter is stored.

    Attributes:
        names: module path → tensor name in the file.
        absent: module paths with no tensor, and the value the layout gives them.
        copies: tensor names that may repeat another one and are checked against it.
    """

    names: Mapping[str, str]
    absent: Mapping[str, Tensor]
    copies: Mapping[str, str]


def load_drafter(
    directory: Path | str, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> Drafter:
    """The drafter in ``directory``, of the ``transformers`` or the ``litert`` layout, in evaluation mode.

    Args:
        directory: what an extraction wrote, or an official assistant checkpoint.
        dtype: float32 or bfloat16; None keeps the stored one.
        device: where the weights go.

    Raises:
        DrafterError: no such files; a tensor missing, unexpected, or of another shape; or FP16 asked for.
    """
    directory = Path(directory)
    parsed, config_name = read_json_config(directory)
    is_litert = config_name == LITERT_CONFIG
    config = DrafterConfig.from_litert(parsed) if is_litert else DrafterConfig.from_transformers(parsed)
    layout = _litert_layout(config, parsed) if is_litert else _transformers_layout(config)
    path = directory / _WEIGHTS[config_name]
    if not path.is_file():
        raise DrafterError(
            f"expected {_WEIGHTS[config_name]} in {escape(directory)}, found none; extract the drafter anew"
        )
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError) as error:
        raise DrafterError(
            f"expected safetensors in {escape(path)}, found: {escape(error)}; extract the drafter anew"
        ) from error
    return _assemble(config, layout, tensors, dtype, device)


def build_drafter(
    config: DrafterConfig,
    tensors: Mapping[str, Tensor],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> Drafter:
    """A drafter from tensors in memory, under the names of the ``transformers`` layout.

    Raises:
        DrafterError: as :func:`load_drafter`.
    """
    return _assemble(config, _transformers_layout(config), tensors, dtype, device)


def _assemble(
    config: DrafterConfig,
    layout: _Layout,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype | None,
    device: torch.device | str,
) -> Drafter:
    with torch.device("meta"):
        drafter = Drafter(config)
    expected = {path: tensor.shape for path, tensor in drafter.state_dict().items()}
    problems = [
        f"{escape(name)}: expected a tensor for {path}, found none"
        for path, name in layout.names.items()
        if name not in tensors
    ]
    known = {*layout.names.values(), *layout.copies}
    problems += [
        f"{escape(name)}: expected no such tensor, found {list(tensors[name].shape)}"
        for name in tensors
        if name not in known
    ]
    problems += [
        f"{escape(name)}: expected shape {list(expected[path])}, found {list(tensors[name].shape)}"
        for path, name in layout.names.items()
        if name in tensors and tensors[name].shape != expected[path]
    ]
    problems += [
        f"{escape(name)}: expected the same values as {escape(original)} (tied weights), found others"
        for name, original in layout.copies.items()
        if name in tensors and original in tensors and not torch.equal(tensors[name], tensors[original])
    ]
    if problems:
        raise DrafterError(
            "the checkpoint does not match its config; extract the drafter anew, or check which model the "
            "config describes:\n  " + "\n  ".join(sorted(problems))
        )
    stored = tensors[layout.names["pre_projection.weight"]].dtype
    _check_dtype(dtype or stored, asked=dtype is not None)
    # A name may serve several paths (constants the graph shares): `.to` keeps one tensor where nothing
    # changes.
    state = {path: tensors[name] for path, name in layout.names.items()} | dict(layout.absent)
    drafter.load_state_dict(
        {
            path: tensor.to(device, (dtype or stored) if tensor.is_floating_point() else torch.long)
            for path, tensor in state.items()
        },
        strict=True,
        assign=True,
    )
    return drafter.eval().requires_grad_(False)


def _check_dtype(dtype: torch.dtype, *, asked: bool) -> None:
    if dtype is torch.float16:
        how = "float16 was asked for" if asked else "the checkpoint is stored as float16 and no dtype was given"
        raise DrafterError(
            f"expected float32 or bfloat16 to compute in, but {how}. The activations of Gemma 4 exceed "
            "float16's largest "
            "number, 65504, and turn into infinities. Pass dtype=torch.bfloat16 or torch.float32"
        )
    if dtype not in _DTYPES:
        raise DrafterError(f"expected float32 or bfloat16 to compute in, found {dtype}; pass dtype=torch.float32")


def _paths(config: DrafterConfig) -> list[str]:
    with torch.device("meta"):
        return list(Drafter(config).state_dict())


def _transformers_layout(config: DrafterConfig) -> _Layout:
    by_role = {role.name: role.transformers for role in roles_of(len(config.layers))}
    names = {path: _ORDERED_HEAD.get(path) or by_role[path.removesuffix(".weight")] for path in _paths(config)}
    return _Layout(names, {}, {"lm_head.weight": names["lm_head.weight"]})


def _litert_layout(config: DrafterConfig, parsed: Mapping[str, Any]) -> _Layout:
    table = parsed.get("tensors")
    if not isinstance(table, dict):
        raise DrafterError(
            f"expected a table of roles under 'tensors' in {LITERT_CONFIG}, found none; extract the drafter anew"
        )
    roles = {path.removesuffix(".weight"): path for path in _paths(config)}
    if unknown := sorted(set(table) - set(roles)):
        raise DrafterError(
            f"expected no role {', '.join(map(escape, unknown))} in {LITERT_CONFIG}; extract the drafter anew"
        )
    names = {path: str(table[role]) for role, path in roles.items() if role in table}
    # The graph of a layer without a scalar multiplies by nothing, which is 1.
    absent = {
        path: torch.ones(1) for role, path in roles.items() if role not in table and role.endswith(".layer_scalar")
    }
    if missing := sorted(role for role, path in roles.items() if path not in names and path not in absent):
        raise DrafterError(
            f"expected roles {', '.join(missing)} in {LITERT_CONFIG}, found none; extract the drafter anew"
        )
    return _Layout(names, absent, {})
