"""A checkpoint as a folder that transformers, vLLM and llama.cpp's converter load; without JAX."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from skerry.errors import ModelError
from skerry.folders import writing
from skerry.models import adapters, hf
from skerry.models.arch import Arch, parse
from skerry.models.presets import arch_of
from skerry.models.saving import save_tensors
from skerry.models.tensors import tensors_of
from skerry.settings.checks import TOKENIZER, refuse_tokenizer
from skerry.settings.loading import run_config_from_json
from skerry.settings.local import StoreSettings
from skerry.store import checkpoint
from skerry.store.finding import locate

DEFAULT_DTYPE = "float32"


def export_hf(
    where: str,
    out: str | Path,
    access: StoreSettings,
    *,
    source: str | Path | None = None,
    dtype: str | None = None,
) -> Path:
    """Write a checkpoint's parameters as Hugging Face weights, and return the folder.

    ``source`` is a folder whose tokenizer and generation settings are copied beside them;
    ``dtype`` None: that of the model's config.json, float32 where it names none.

    Raises StoreError for a checkpoint that cannot be read, ModelError for a model that Hugging Face
    does not have, and ConfigError for a folder that is not empty or cannot be written, or for a
    tokenizer that is not the run's.
    """
    target = Path(out)
    if source is not None and not any(Path(source, name).is_file() for name in hf.COMPANIONS):
        msg = f"{source} has no tokenizer: name the folder that has tokenizer.json."
        raise ModelError(msg, path="tokenizer")
    saved, tensors = checkpoint.params(*locate(where, access))
    config = run_config_from_json(json.dumps(saved.config))
    if config.model.factory:
        msg = f"{where} has a model of your own, for which Hugging Face has no config.json."
        raise ModelError(msg, path="model.factory")
    if source is not None and Path(source, TOKENIZER).is_file():
        refuse_tokenizer(Path(source), config.data.tokenizer)
    arch = arch_of(config.model)
    if config.model.lora_rank:
        folder = adapters.base_folder(config.model)
        if folder is None:
            msg = f"{where} has adapters beside fresh weights: export them with --to peft."
            raise ModelError(msg, path="to")
        scale = adapters.alpha_of(config.model) / config.model.lora_rank
        full = adapters.merged(arch, hf.read_tensors(folder, arch), tensors, scale)
        hf.write(target, arch, full, source, dtype=dtype or _dtype_of(arch))
        return target
    wanted = {name: tensor.shape for name, tensor in tensors_of(arch).items()}
    if wanted != {name: tensor.shape for name, tensor in tensors.items()}:
        msg = f"{where} holds other tensors than its config.json makes: use the release it is of."
        raise ModelError(msg, path="model.config")
    hf.write(target, arch, tensors, source, dtype=dtype or _dtype_of(arch))
    return target


def export_peft(
    where: str,
    out: str | Path,
    access: StoreSettings,
    *,
    source: str | Path | None = None,
    dtype: str | None = None,
) -> Path:
    """Write a checkpoint's adapters as the peft library loads them, and return the folder.

    ``source`` is the folder of the weights that they adapt. Raises as ``export_hf``.
    """
    if dtype not in (None, "float32"):
        msg = f"Adapters are stored in float32, not in {dtype}: leave --dtype out."
        raise ModelError(msg, path="dtype")
    saved, tensors = checkpoint.params(*locate(where, access))
    model = run_config_from_json(json.dumps(saved.config)).model
    if not model.lora_rank:
        msg = f"{where} has no adapters: export it with --to hf."
        raise ModelError(msg, path="to")
    adapters.write_peft(out, model, tensors, str(source or ""))
    return Path(out)


def _dtype_of(arch: Arch) -> str:
    """Return the type that a config.json stores its weights in."""
    table: Mapping[str, object] = parse(arch.config)
    found = table.get("dtype", table.get("torch_dtype"))
    return found if isinstance(found, str) and found in hf.DTYPES else DEFAULT_DTYPE


def export_tensors(
    where: str,
    out: str | Path,
    access: StoreSettings,
    *,
    source: str | Path | None = None,
    dtype: str | None = None,
) -> Path:
    """Write the parameters of any checkpoint by name, without a config; return the folder.

    Raises StoreError as ``export_hf``, and ConfigError for a folder that is not empty.
    """
    del source
    target, (_, tensors) = Path(out), checkpoint.params(*locate(where, access))
    made = {n: np.asarray(t, hf.DTYPES[dtype or DEFAULT_DTYPE]) for n, t in tensors.items()}
    with writing(target) as draft:
        save_tensors(made, draft / hf.SINGLE)
    return target


FORMS = {"hf": export_hf, "peft": export_peft, "tensors": export_tensors}
"""The function that writes each form of export."""
