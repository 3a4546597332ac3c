"""A learner inside Lightning's Trainer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from lightning.pytorch import Callback

from skerry.client.asked import Config
from skerry.client.torch_island import join
from skerry.errors import ConfigError


class LightningCallback(Callback):  # type: ignore[misc] # Lightning counts as untyped
    """Makes a ``lightning.Trainer`` one learner of a run: ``Trainer(callbacks=[...])``.

    ``tokens`` counts the tokens of a batch over all processes. ``module`` names the part of the
    LightningModule that is the run's model; leaf names are then that model's own.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        tokens: Callable[[Any], int],
        run: str = "main",
        name: str | None = None,
        config: Config = None,
        module: str = "",
    ) -> None:
        """Take what ``skerry.torch.join`` takes."""
        self._options: dict[str, Any] = {"url": url, "run": run, "name": name, "config": config}
        self._count = tokens
        self._module = module
        self._around = ExitStack()
        self._losses: list[Any] = []
        self._tokens = self._steps = 0
        self._alone = False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Join the run, and adopt its state."""
        optimizer = trainer.optimizers[0] if len(trainer.optimizers) == 1 else None
        try:
            model = pl_module.get_submodule(self._module)
        except AttributeError as error:
            parts = ", ".join(name for name, _ in pl_module.named_children())
            msg = f"The LightningModule has no module {self._module!r}: it has {parts}."
            raise ConfigError(msg) from error
        self._losses, self._tokens, self._steps = [], 0, trainer.global_step
        self._alone = False
        joined = join(**self._options, model=model, optimizer=optimizer)
        self.island = self._around.enter_context(joined)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Answer and adopt once the optimizer has taken a step."""
        del batch_idx
        if self._alone:
            return  # the run is over, and the trainer was asked to go on
        loss = outputs.get("loss")
        if loss is None and pl_module.automatic_optimization:
            return  # training_step has skipped the batch
        if loss is None:
            msg = "LightningCallback reports the loss: return it from training_step."
            raise ConfigError(msg)
        self._tokens += self._count(batch)
        self._losses.append(loss * trainer.accumulate_grad_batches)  # the trainer has divided it
        if trainer.global_step > self._steps:
            self.island.step(tokens=self._tokens, loss=sum(self._losses) / len(self._losses))
            self._losses, self._tokens, self._steps = [], 0, trainer.global_step
            self._alone = self.island.done
            if self._alone:  # leave before a checkpoint is written
                self._around.close()
                trainer.should_stop = True

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave the run, if it is not over."""
        del trainer, pl_module
        self._around.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave the run without its last answers."""
        del trainer, pl_module
        self._around.__exit__(type(exception), exception, exception.__traceback__)
