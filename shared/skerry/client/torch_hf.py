"""Hugging Face's models of a run, and a learner inside its Trainer."""

from __future__ import annotations

import atexit
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback

from skerry.client.asked import Config
from skerry.client.torch_island import join
from skerry.errors import ConfigError, ModelError
from skerry.models.arch import parse
from skerry.models.presets import arch_of
from skerry.settings.models import RunConfig

UNSHIFTED = ("ForMaskedLM", "ForTokenClassification")
"""Losses of transformers that compare each label with the score at its own position."""


def model_of(config: RunConfig) -> Any:
    """Return the transformers model that a run trains, with fresh float32 weights.

    Its tensors have the names and shapes of the run's. Raises ModelError for a run of another
    model.
    """
    if config.model.factory or config.model.lora_rank:
        msg = "This run trains a model of its own or adapters: transformers has no such model."
        raise ModelError(msg, path="model")
    table = parse(arch_of(config.model).config)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**table), dtype="float32")


def counted(model: Any, labels: Any) -> Any:
    """Return how many labels count in a model's loss; shifting drops the first of each row."""
    whole = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    whole |= labels.dim() == 1 or getattr(model, "loss_type", "") in UNSHIFTED
    return (labels if whole else labels[..., 1:]).ne(-100).sum()


class SkerryCallback(TrainerCallback):  # type: ignore[misc] # transformers counts as untyped
    """Makes a ``transformers.Trainer`` one learner of a run: ``Trainer(callbacks=[...])``.

    Training ends with the run, or with the Trainer's own last step. The Trainer does not tell its
    callbacks when training fails: the learner then leaves at the end of the program, or of a block
    around the training, ``with callback: trainer.train()``. The model computes its loss from
    ``labels``; those that are not -100 count as tokens. The Trainer reads its data in its own
    order, and from the beginning after a restart.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        run: str = "main",
        name: str | None = None,
        config: Config = None,
    ) -> None:
        """Take what ``skerry.torch.join`` takes."""
        self._options: dict[str, Any] = {"url": url, "run": run, "name": name, "config": config}
        self._around = ExitStack()
        atexit.register(self._around.__exit__, SystemExit, SystemExit(), None)
        self._losses: list[Any] = []
        self._tokens: list[Any] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the run, if training has not."""
        self._around.__exit__(kind, error, trace)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any, **_: Any
    ) -> None:
        """Join the run, and adopt its state."""
        del state, control
        self._around.close()  # the Trainer says nothing when an earlier start has failed
        self._of_all = args.world_size
        self._losses, self._tokens = [], []
        optimizer = getattr(optimizer, "optimizer", optimizer)  # what accelerate has wrapped
        joined = join(**self._options, model=model, optimizer=optimizer)
        self.island = self._around.enter_context(joined)
        self._around.callback(model.register_forward_hook(self._note, with_kwargs=True).remove)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Answer and adopt after each step of the optimizer."""
        del args, state
        if not self._tokens:
            msg = (
                "The model was given no labels in this step: SkerryCallback counts those of the"
                " model's own loss. Leave out label_smoothing_factor and compute_loss_func, or"
                " train in a loop with skerry.torch.join."
            )
            raise ConfigError(msg)
        counted = sum(self._tokens)
        loss = sum(self._losses) / counted
        self._losses, self._tokens = [], []
        self.island.step(tokens=self._of_all * int(counted), loss=loss)
        if self.island.done:  # leave before the Trainer loads and saves what it thinks is best
            self._around.close()
            control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Leave the run, if it is not over."""
        del args, state, control
        self._around.close()

    def _note(self, model: Any, _args: Any, given: dict[str, Any], output: Any) -> None:
        """Note a micro-batch: how many labels it has, and the sum of their losses."""
        if model.training and (labels := given.get("labels")) is not None:
            count = counted(model, labels)
            of_step = given.get("num_items_in_batch")  # what a step of several has divided by
            self._tokens.append(count)
            self._losses.append(output.loss.detach() * (count if of_step is None else of_step))
