"""What a training job is made of, and the usual values for each model."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch

from pyg_fullgraph.data import Dataset, load_dataset
from pyg_fullgraph.errors import InputError
from pyg_fullgraph.order import ORDERS

MODELS = ("gcn", "sage", "gin", "gat", "gatv2")
DTYPES = {name: getattr(torch, name) for name in ("float32", "float64", "bfloat16", "float16")}

# What the models' papers use on the citation graphs; docs/datasets.md says what they reach.
_CONVOLUTION = {"hidden": 16, "heads": 1, "dropout": 0.5, "lr": 0.01, "weight_decay": 5e-4, "epochs": 200}
_ATTENTION = {"hidden": 8, "heads": 8, "dropout": 0.6, "lr": 0.005, "weight_decay": 5e-4, "epochs": 300}
_PRESETS: dict[str, dict[str, Any]] = {
    "gcn": _CONVOLUTION,
    "sage": _CONVOLUTION,
    "gin": _CONVOLUTION,
    "gat": _ATTENTION,
    "gatv2": _ATTENTION,
}
# Without dropout two implementations follow one curve, so a comparison shows rounding and nothing else.
_PRESET_GENERATED = {"dropout": 0.0, "lr": 0.01, "epochs": 60}


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training job. `TrainConfig.preset` fills in the usual values for a model.

    Args:
        dataset: what `load_dataset` takes. split: column of the masks. normalize_features: rows sum to one.
        reorder: a method of `pyg_fullgraph.transforms.Reorder` by which nodes are renumbered; None keeps their numbers.
        model: gcn, sage, gin, gat or gatv2. layers: how many.
        hidden: width of a hidden layer, per head. heads: attention heads of the hidden layers; the last layer has one.
        dropout: on the input of every layer, and on the attention.
        lr, weight_decay: of Adam; for gcn the decay acts on the first layer only, as its paper does.
        epochs: at most. patience: epochs without a better validation loss or accuracy before stopping; 0: never stop.
        seeds: number of runs, seeded 0, 1, ...
        dtype: of features, activations and messages; float16 and bfloat16 keep float32 master weights.
        device: auto (CUDA where there is one), cpu or cuda.
        compare: "pyg" also trains the same model from the same weights on PyG's layers.
        out: folder for checkpoints, metrics and plot; None writes nothing.
        resume: continue from the checkpoints in `out`.
        timeline: folder for the timeline of one epoch of the first seed, see `pyg_fullgraph.timeline`; None makes none.
        capture: replay the training step of the fused layers as a CUDA graph, see `pyg_fullgraph.capture`.
    Raises: InputError for a value out of range, or cuda where there is none.
    """

    dataset: str
    model: str
    hidden: int
    heads: int
    dropout: float
    lr: float
    weight_decay: float
    epochs: int
    layers: int = 2
    patience: int = 100
    split: int = 0
    normalize_features: bool = False
    reorder: str | None = None
    seeds: int = 1
    dtype: str = "float32"
    device: str = "auto"
    compare: str | None = None
    out: str | None = None
    resume: bool = False
    timeline: str | None = None
    capture: bool = False

    def __post_init__(self) -> None:
        _require("model", self.model in MODELS, f"to be one of {', '.join(MODELS)}", self.model)
        _require("dtype", self.dtype in DTYPES, f"to be one of {', '.join(DTYPES)}", self.dtype)
        _require("device", self.device in ("auto", "cpu", "cuda"), "to be auto, cpu or cuda", self.device)
        _require("compare", self.compare in (None, "pyg"), "to be 'pyg' or nothing", self.compare)
        orders = ("nothing", *ORDERS)
        _require("reorder", self.reorder in (None, *ORDERS), f"to be one of {', '.join(orders)}", self.reorder)
        for name in ("layers", "hidden", "heads", "epochs", "seeds"):
            _require(name, getattr(self, name) >= 1, "to be at least 1", getattr(self, name))
        _require("patience", self.patience >= 0, "to be at least 0", self.patience)
        _require("dropout", 0.0 <= self.dropout < 1.0, "to be in [0, 1)", self.dropout)
        _require("lr", 0.0 < self.lr < math.inf, "to be above 0 and finite", self.lr)
        _require("weight_decay", 0.0 <= self.weight_decay < math.inf, "to be at least 0 and finite", self.weight_decay)
        _require("resume", self.out is not None or not self.resume, "to come with an output folder", "none")
        has_cuda = torch.cuda.is_available()
        _require("device", has_cuda or self.device != "cuda", "to be on this machine", "cuda; see the command 'info'")
        if self.device == "auto":
            object.__setattr__(self, "device", "cuda" if has_cuda else "cpu")
        _require("capture", not self.capture or self.device == "cuda", "to come with a CUDA device", self.device)
        # The scale of a loss is decided on the host.
        _require("capture", not self.capture or self.dtype != "float16", "to come with another dtype", self.dtype)

    @classmethod
    def preset(cls, dataset: str = "generated", model: str = "gat", **options: Any) -> TrainConfig:
        """The usual setup for a model and dataset; options that are given and not None replace parts of it."""
        values = dict(_PRESETS.get(model, _CONVOLUTION))
        if dataset.partition(":")[0] == "generated":
            values |= _PRESET_GENERATED
        values |= {name: value for name, value in options.items() if value is not None}
        return cls(dataset=dataset, model=model, **values)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def has_attention(self) -> bool:
        return self.model in ("gat", "gatv2")

    def load_dataset(self) -> Dataset:
        """The dataset on the CPU, with rows normalised and nodes renumbered if asked for."""
        dataset = load_dataset(self.dataset, self.split)
        dataset = dataset.normalize_features() if self.normalize_features else dataset
        return dataset if self.reorder is None else dataset.reorder(self.reorder)

    def asdict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def _require(name: str, is_met: bool, expected: str, got: object) -> None:
    if not is_met:
        raise InputError(name, expected, got)
