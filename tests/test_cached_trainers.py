"""A cached loss inside real trainers: each takes the steps that it takes with the plain loss."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import lightning
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader

import infloss
from cached import Encoder, rows
from infloss import cached_loss

PAIRS = 24
BATCH, CHUNK = 6, 4
MICRO_BATCHES = 2  # of a step
LEARNING_RATE = 0.5


class TwoTowers(nn.Module):
    """Encoders with a scale; its forward is the loss, plain or cached."""

    def __init__(self, cached: bool) -> None:
        super().__init__()
        self.img, self.txt, self.cached = Encoder(1), Encoder(2), cached
        self.log_scale = nn.Parameter(torch.tensor(1.0))
        self.float()

    def loss_fn(self, img: Tensor, txt: Tensor) -> Tensor:
        return infloss.contrastive_loss(img, txt, self.log_scale.exp())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.cached:
            return cached_loss(self.loss_fn, [(self.img, x, CHUNK), (self.txt, y, CHUNK - 1)])
        return self.loss_fn(self.img(x), self.txt(y))


def batches() -> DataLoader[dict[str, Tensor]]:
    return DataLoader(pairs(), batch_size=BATCH)  # type: ignore


def pairs() -> list[dict[str, Tensor]]:
    columns = rows(PAIRS, seed=1).float(), rows(PAIRS, seed=2).float()
    return [{"x": x, "y": y} for x, y in zip(*columns, strict=True)]


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def by_scaler(model: TwoTowers, folder: Path) -> None:
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=65536.0), sgd(model)
    for index, batch in enumerate(batches()):
        with torch.autocast("cpu", torch.bfloat16, enabled=False):
            loss = model(**batch) / MICRO_BATCHES
        scaler.scale(loss).backward()
        if (index + 1) % MICRO_BATCHES == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


def by_accelerate(model: TwoTowers, folder: Path) -> None:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=MICRO_BATCHES)
    wrapped, optimizer, loader = accelerator.prepare(model, sgd(model), batches())
    for batch in loader:
        with accelerator.accumulate(wrapped):
            accelerator.backward(wrapped(**batch))
            optimizer.step()
            optimizer.zero_grad()


class Lightning(lightning.LightningModule):
    """Both ways that Lightning has of running a step."""

    def __init__(self, model: TwoTowers, automatic: bool) -> None:
        super().__init__()
        self.model, self.automatic_optimization = model, automatic

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self.model)

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        loss = self.model(**batch)
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss / MICRO_BATCHES)
        if (index + 1) % MICRO_BATCHES == 0:
            optimizer: Any = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()


def by_lightning(automatic: bool) -> Callable[[TwoTowers, Path], None]:
    def train(model: TwoTowers, folder: Path) -> None:
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            accumulate_grad_batches=MICRO_BATCHES if automatic else 1,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Lightning(model, automatic), batches())

    return train


class HuggingFace(transformers.Trainer):
    """A trainer whose loss is the model's own."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Tensor:
        return model(**inputs)


def by_transformers(model: TwoTowers, folder: Path) -> None:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        num_train_epochs=1,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=MICRO_BATCHES,
        train_sampling_strategy="sequential",
        optim="sgd",
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        weight_decay=0.0,
        remove_unused_columns=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    HuggingFace(model, arguments, train_dataset=pairs()).train()  # type: ignore


def by_hand(model: TwoTowers, folder: Path) -> None:
    optimizer = sgd(model)
    for index, batch in enumerate(batches()):
        (model(**batch) / MICRO_BATCHES).backward()
        if (index + 1) % MICRO_BATCHES == 0:
            optimizer.step()
            optimizer.zero_grad()


TRAINERS = {
    "GradScaler": by_scaler,
    "Accelerate": by_accelerate,
    "Lightning, automatic": by_lightning(True),
    "Lightning, manual": by_lightning(False),
    "transformers": by_transformers,
}


@pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore::UserWarning:torch")
@pytest.mark.parametrize("name", TRAINERS)
def test_trains_as_the_plain_loss_does(name: str, tmp_path: Path) -> None:
    """Two steps of two batches; every parameter, the scale included, where SGD by hand has it."""
    expected, found = TwoTowers(cached=False), TwoTowers(cached=True)
    before = [one.detach().clone() for one in found.parameters()]
    by_hand(expected, tmp_path)
    TRAINERS[name](found, tmp_path)
    assert len(found.img.rows) == 2 * PAIRS // BATCH * 2  # two passes over two chunks of a batch
    for one, other, start in zip(found.parameters(), expected.parameters(), before, strict=True):
        assert not torch.equal(one, start)
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
