"""Hugging Face's Trainer and Lightning's as learners: real trainers, a real broker and syncer."""

from __future__ import annotations

import atexit
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skerry.client.loop_thread import LoopThread
from skerry.errors import ConfigError
from skerry.log import ledger
from skerry.log.nats.bus import NatsBus
from skerry.protocol.messages import RunState
from tests.support.builders import wait_until
from tests.support.joins import CONFIG as JOINED
from tests.support.nats_server import NatsServer
from tests.support.processes import call

torch: Any = pytest.importorskip("torch")
skerry_torch: Any = pytest.importorskip("skerry.torch")
TorchIsland: Any = pytest.importorskip("skerry.client.torch_island").TorchIsland
torch.set_num_threads(1)

pytestmark = [
    pytest.mark.nats,
    pytest.mark.drill,
    pytest.mark.timeout(240),
    pytest.mark.usefixtures("quiet"),
    # Trainers warn of what is slow or deprecated on this machine: nothing of ours.
    pytest.mark.filterwarnings("ignore:::(transformers|lightning|accelerate|torch)"),
    pytest.mark.filterwarnings("ignore:.*(pin_memory|num_workers|LeafSpec|isinstance)"),
]

BATCH, SEQ, VOCAB = 4, 16, 64
CONFIG = {**JOINED, "data": {"batch": BATCH, "seq_len": SEQ}}


def rows() -> list[dict[str, Any]]:
    drawn = torch.from_numpy(np.random.default_rng(0).integers(0, VOCAB, (64, 1)))
    ids = (drawn + torch.arange(SEQ + 1)) % VOCAB
    return [{"input_ids": row, "labels": row} for row in ids]


def of_run(thread: LoopThread, url: str, run: str) -> Any:
    async def read() -> Any:
        async with NatsBus(url, name="test") as bus:
            return await ledger.read_run(bus, run), await ledger.last_commits(bus, run)

    return thread.result(read())


@pytest.fixture
def stepped(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, float]]:
    """Return the tokens and the loss of each step that a callback has reported."""
    found = list[tuple[int, float]]()
    step = TorchIsland.step

    def spy(island: Any, *, tokens: Any, loss: Any, **more: Any) -> None:
        found.append((tokens, float(loss)))
        step(island, tokens=tokens, loss=loss, **more)

    monkeypatch.setattr(TorchIsland, "step", spy)
    return found


def hf_trainer(callback: Any, folder: Path, **arguments: Any) -> Any:
    transformers: Any = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model = transformers.LlamaForCausalLM(config)
    given = {"per_device_train_batch_size": BATCH, "max_steps": 1000, **arguments}
    args = transformers.TrainingArguments(
        output_dir=str(folder),
        learning_rate=1e-2,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        **given,
    )
    callbacks = callback if isinstance(callback, list) else [callback]
    return transformers.Trainer(model=model, args=args, train_dataset=rows(), callbacks=callbacks)


def test_hugging_faces_trainer_is_a_learner(
    shared_nats: NatsServer, run_id: str, tmp_path: Path, thread: LoopThread, syncer: None
) -> None:
    callback = skerry_torch.SkerryCallback(shared_nats.url, run=run_id, name="hf", config=CONFIG)
    trainer = hf_trainer(callback, tmp_path)
    trainer.train()
    assert trainer.state.global_step == 40, "the run ended it"
    record, commits = of_run(thread, shared_nats.url, run_id)
    assert record.state is RunState.FINISHED
    assert callback.island.config.model.config, "the run's record describes the model"
    assert "model.layers.0.mlp.up_proj.weight" in {leaf.name for leaf in record.leaves}
    counted = [row.tokens for commit in commits.values() for row in commit.consumed if row.steps]
    assert counted
    assert all(tokens % (BATCH * SEQ) == 0 for tokens in counted), "targets, not inputs"
    assert callback.island.cursor == 40 * BATCH


def test_a_trainer_that_accumulates_reports_all_tokens_and_the_mean_loss_of_a_step(
    shared_nats: NatsServer,
    run_id: str,
    tmp_path: Path,
    syncer: None,
    stepped: list[tuple[int, float]],
) -> None:
    callback = skerry_torch.SkerryCallback(shared_nats.url, run=run_id, name="hf", config=CONFIG)
    size, by = BATCH // 2, {"gradient_accumulation_steps": 2}
    trainer = hf_trainer(callback, tmp_path, per_device_train_batch_size=size, max_steps=1, **by)
    trainer.train()
    ((tokens, loss),) = stepped
    assert tokens == BATCH * SEQ
    assert loss == pytest.approx(trainer.state.log_history[-1]["train_loss"], rel=1e-3)


def test_a_trainer_that_computes_the_loss_itself_is_refused_in_a_sentence(
    shared_nats: NatsServer, run_id: str, tmp_path: Path, syncer: None
) -> None:
    callback = skerry_torch.SkerryCallback(shared_nats.url, run=run_id, name="hf", config=CONFIG)
    trainer = hf_trainer(callback, tmp_path, label_smoothing_factor=0.1)
    with pytest.raises(ConfigError, match="given no labels"):
        trainer.train()
    callback.on_train_end(None, None, None)


def test_a_trainer_that_failed_trains_again(
    shared_nats: NatsServer,
    run_id: str,
    tmp_path: Path,
    syncer: None,
    stepped: list[tuple[int, float]],
) -> None:
    callback = skerry_torch.SkerryCallback(shared_nats.url, run=run_id, name="hf", config=CONFIG)
    trainer = hf_trainer(callback, tmp_path)
    compute = trainer.compute_loss

    def fail(*given: Any, **more: Any) -> Any:
        compute(*given, **more)
        raise InterruptedError

    trainer.compute_loss = fail
    with pytest.raises(InterruptedError):
        trainer.train()
    trainer.compute_loss = compute
    trainer.train()
    assert {tokens for tokens, _ in stepped} == {BATCH * SEQ}


def test_a_learner_whose_training_failed_leaves_with_the_block_or_with_the_program(
    shared_nats: NatsServer,
    run_id: str,
    tmp_path: Path,
    syncer: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_exit = list[Any]()
    monkeypatch.setattr(atexit, "register", lambda *call: at_exit.append(partial(*call)))
    callback = skerry_torch.SkerryCallback(shared_nats.url, run=run_id, name="hf", config=CONFIG)
    trainer = hf_trainer(callback, tmp_path, label_smoothing_factor=0.1)
    with pytest.raises(ConfigError, match="given no labels"), callback:
        trainer.train()
    with pytest.raises(ConfigError, match="has left its run"):
        callback.island.step(tokens=1, loss=1.0)
    with pytest.raises(ConfigError, match="given no labels"):
        trainer.train()
    callback.island.step(tokens=1, loss=1.0)
    at_exit[0]()
    with pytest.raises(ConfigError, match="has left its run"):
        callback.island.step(tokens=1, loss=1.0)


def test_what_a_trainer_loads_at_its_end_is_in_no_round(
    shared_nats: NatsServer, run_id: str, tmp_path: Path, syncer: None
) -> None:
    transformers: Any = pytest.importorskip("transformers")

    class Best(transformers.TrainerCallback):  # type: ignore[misc, name-defined] # untyped here
        def on_train_end(self, *_: Any, model: Any, **_more: Any) -> None:
            """Do as ``load_best_model_at_end`` does."""
            for parameter in model.parameters():
                parameter.data.fill_(100.0)

    callback = skerry_torch.SkerryCallback(shared_nats.url, run=run_id, name="hf", config=CONFIG)
    trainer = hf_trainer([Best(), callback], tmp_path)
    trainer.train()
    assert all((parameter == 100.0).all() for parameter in trainer.model.parameters())


def test_labels_are_counted_where_the_model_predicts_them() -> None:
    hf: Any = pytest.importorskip("skerry.client.torch_hf")
    transformers: Any = pytest.importorskip("transformers")
    size = {"vocab_size": VOCAB, "hidden_size": 16, "num_attention_heads": 2}
    size |= {"num_hidden_layers": 1, "intermediate_size": 16}
    bert = transformers.BertConfig(**size)
    each = {
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**size)): SEQ - 1,
        transformers.T5ForConditionalGeneration(
            transformers.T5Config(vocab_size=VOCAB, d_model=8, d_ff=8, num_layers=1, num_heads=1)
        ): SEQ,
        transformers.BertForMaskedLM(bert): SEQ,
        transformers.BertForTokenClassification(bert): SEQ,
    }
    labels = torch.zeros(1, SEQ, dtype=torch.int64)
    assert {model: int(hf.counted(model, labels)) for model in each} == each


def lightning_fit(callback: Any, folder: Path, *, size: int = BATCH, **arguments: Any) -> Any:
    """Fit a module by hand where ``by_hand``, and return the trainer and its losses."""
    lightning: Any = pytest.importorskip("lightning.pytorch")
    losses, by_hand = list[float](), arguments.pop("by_hand", False)

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined] # untyped here
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Embedding(VOCAB, 8), torch.nn.Linear(8, VOCAB))
            self.automatic_optimization = not by_hand

        def training_step(self, batch: Any, _index: int) -> Any:
            ids = batch["input_ids"]
            scores = self.net(ids[:, :-1])
            loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), ids[:, 1:].flatten())
            losses.append(float(loss.detach()))
            return None if by_hand else loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    trainer = lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
        default_root_dir=folder,
        **arguments,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(rows(), batch_size=size))
    return trainer, losses


def in_lightning(url: str, run: str, module: str = "net") -> Any:
    return skerry_torch.LightningCallback(
        *(url,),
        tokens=lambda batch: batch["input_ids"][:, 1:].numel(),
        run=run,
        name="lightning",
        config=CONFIG,
        module=module,
    )


def test_lightnings_trainer_is_a_learner(
    shared_nats: NatsServer, run_id: str, tmp_path: Path, thread: LoopThread, syncer: None
) -> None:
    trainer, _ = lightning_fit(in_lightning(shared_nats.url, run_id), tmp_path, max_steps=1000)
    assert trainer.global_step == 40, "the run ended it"
    record, _ = of_run(thread, shared_nats.url, run_id)
    assert record.state is RunState.FINISHED
    assert {leaf.name for leaf in record.leaves} == {"0.weight", "1.weight", "1.bias"}


def test_lightning_may_go_on_alone_after_its_run(
    shared_nats: NatsServer, run_id: str, tmp_path: Path, syncer: None
) -> None:
    by = {"max_steps": 1000, "min_steps": 45}
    trainer, _ = lightning_fit(in_lightning(shared_nats.url, run_id), tmp_path, **by)
    assert trainer.global_step == 45


def test_lightning_leaves_a_run_that_ends_while_it_trains_on_a_batch(
    shared_nats: NatsServer, run_id: str, tmp_path: Path, thread: LoopThread, syncer: None
) -> None:
    """As it does where time ends a run, or faster learners."""

    class Waiting(skerry_torch.LightningCallback):  # type: ignore[misc, name-defined] # untyped
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                wait_until(lambda: self.island.done)

    ends = {**CONFIG, "train": {"steps": 10_000_000, "duration_s": 1.0}}
    callback = Waiting(
        *(shared_nats.url,), tokens=lambda _: 1, run=run_id, name="l", config=ends, module="net"
    )
    trainer, _ = lightning_fit(callback, tmp_path, max_steps=10)
    assert trainer.global_step == 4
    record, commits = of_run(thread, shared_nats.url, run_id)
    assert record.state is RunState.FINISHED
    held = callback.island.versions
    assert held == tuple(commits[fragment].version for fragment in range(len(held)))


def test_lightning_that_accumulates_reports_all_tokens_and_the_mean_loss_of_a_step(
    shared_nats: NatsServer,
    run_id: str,
    tmp_path: Path,
    syncer: None,
    stepped: list[tuple[int, float]],
) -> None:
    by: dict[str, Any] = {"accumulate_grad_batches": 2, "size": BATCH // 2}
    _, losses = lightning_fit(in_lightning(shared_nats.url, run_id), tmp_path, max_steps=1, **by)
    assert stepped == [(BATCH * SEQ, pytest.approx(sum(losses) / 2))]


def test_a_lightning_module_that_returns_no_loss_is_refused_in_a_sentence(
    shared_nats: NatsServer, run_id: str, tmp_path: Path, syncer: None
) -> None:
    callback = in_lightning(shared_nats.url, run_id)
    with pytest.raises(ConfigError, match="return it from training_step"):
        lightning_fit(callback, tmp_path, max_steps=1, by_hand=True)


def test_a_part_that_a_lightning_module_has_not_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no module 'typo': it has net"):
        lightning_fit(in_lightning("nats://127.0.0.1:1", "r", "typo"), tmp_path, max_steps=1)


def test_the_fine_tune_of_the_examples_ends_with_a_folder_that_loads(
    shared_nats: NatsServer, run_id: str, tmp_path: Path, syncer: None
) -> None:
    transformers: Any = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    script = Path(__file__).parents[2] / "examples" / "hf_finetune.py"
    folder = tmp_path / "tiny"
    done = call(sys.executable, script, shared_nats.url, "a", str(folder), run_id, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "after 60 steps" in done.stdout
    made, tuned = (
        transformers.AutoModelForCausalLM.from_pretrained(path).state_dict()
        for path in (folder, f"{folder}-a")
    )
    assert made.keys() == tuned.keys()
    assert not torch.equal(made["lm_head.weight"], tuned["lm_head.weight"])
