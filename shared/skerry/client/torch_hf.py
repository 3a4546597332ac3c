"""Hugging Face's models of a run, and a learner inside its Trainer."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback

from skerry.client.asked import Config
from skerry.client.torch_island import join
from skerry.errors import ModelError
from skerry.models.arch import parse
from skerry.models.presets import arch_of
from skerry.settings.models import RunConfig


def model_of(config: RunConfig) -> Any:
    """Return the transformers model that a run trains, with fresh float32 weights.

    Its tensors have the names and shapes of the run's. Raises ModelError for a run of another
    model.
    """
    if config.model.factory or config.model.lora_rank:
        msg = "This run trains a model of its own or adapters: transformers has no such model."
        raise ModelError(msg, path="model")
    table = parse(arch_of(config.model).config)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**table))


class SkerryCallback(TrainerCallback):  # type: ignore[misc] # transformers counts as untyped
    """Makes a ``transformers.Trainer`` one learner of a run: ``Trainer(callbacks=[...])``.

    Training ends with the run, or with the Trainer's own last step. The model computes its loss
    from ``labels``, of which those that are not -100 are counted. The Trainer reads its data in its
    own order: started again, it begins with it afresh.
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
        self._losses: list[Any] = []
        self._tokens: list[Any] = []

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any, **_: Any
    ) -> None:
        """Join the run, and adopt its state."""
        del state, control
        self._of_all = args.world_size
        self._hook = model.register_forward_hook(self._note, with_kwargs=True)
        optimizer = getattr(optimizer, "optimizer", optimizer)  # what accelerate has wrapped
        self.island = join(**self._options, model=model, optimizer=optimizer).__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Answer and adopt after each step of the optimizer."""
        del args, state
        loss = sum(self._losses) / max(1, len(self._losses))
        tokens = self._of_all * sum(int(count) for count in self._tokens)
        self._losses, self._tokens = [], []
        self.island.step(tokens=tokens, loss=loss)
        control.should_training_stop |= self.island.done

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Leave the run."""
        del args, state, control
        self._hook.remove()
        self.island.__exit__(None, None, None)

    def _note(self, model: Any, _args: Any, given: dict[str, Any], output: Any) -> None:
        if model.training and (labels := given.get("labels")) is not None:
            self._losses.append(output.loss.detach())
            self._tokens.append((labels[..., 1:] != -100).sum())
