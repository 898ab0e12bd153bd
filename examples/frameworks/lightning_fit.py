"""PyTorch Lightning with a job's optimizer: a classifier with batch norm.

python lightning_fit.py --plain                                       # torch alone
gadei-ps run fit --learners 2 -- python lightning_fit.py              # two learners
gadei-ps run fit --learners 2 -- python lightning_fit.py --resume     # resume from a checkpoint
"""

import argparse
import os
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gadei_ps.learners.torch

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--plain", action="store_true", help="torch's own optimizer")
parser.add_argument("--directory", default="runs/lightning", help="for checkpoints")
parser.add_argument("--resume", action="store_true", help="from the last checkpoint there")
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--samples", type=int, default=2048)
args = parser.parse_args()
learner = int(os.environ.get("GADEI_PS_LEARNER", "0"))
directory = Path(f"{args.directory}-{learner}")  # each learner keeps checkpoints of its own


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(20, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 2)
        )

    def training_step(self, batch, number):
        inputs, labels = batch
        return nn.functional.cross_entropy(self.layers(inputs), labels)

    def validation_step(self, batch, number):
        inputs, labels = batch
        self.log("loss", nn.functional.cross_entropy(self.layers(inputs), labels))

    def configure_optimizers(self):
        if args.plain:
            optimizer = torch.optim.AdamW(self.parameters(), lr=2e-2)
        else:
            optimizer = gadei_ps.learners.torch.Optimizer(self, kind="adamw", lr=2e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def make_data(count, seed):
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 20, generator=draw)
    return TensorDataset(inputs, (inputs[:, :10].norm(dim=1) > inputs[:, 10:].norm(dim=1)).long())


lightning.seed_everything(0)
model = Classifier()
best = ModelCheckpoint(directory, monitor="loss", save_last=True)
trainer = lightning.Trainer(
    max_epochs=args.epochs,
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    callbacks=[best, LearningRateMonitor()],
    logger=CSVLogger(directory),
    enable_progress_bar=False,
    enable_model_summary=False,
)
shuffle = torch.Generator().manual_seed(learner)  # in an order of each learner's own
train = DataLoader(make_data(args.samples, 1), 16, shuffle=True, generator=shuffle)
validation = DataLoader(make_data(512, 2), 64)
trainer.fit(model, train, validation, ckpt_path=directory / "last.ckpt" if args.resume else None)
(last,) = trainer.validate(model, validation, verbose=False)
(found,) = trainer.validate(model, validation, ckpt_path="best", verbose=False)
print("validation loss: last", last["loss"], "best", found["loss"])
