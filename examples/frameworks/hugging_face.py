"""Hugging Face's Trainer with a job's optimizer: a small BERT that classifies sentences.

python hugging_face.py --plain                                        # torch alone
gadei-ps run bert --learners 2 -- python hugging_face.py              # two learners
gadei-ps run bert --learners 2 -- python hugging_face.py --resume     # resume from a checkpoint
"""

import argparse
import os

import torch
from torch.utils.data import TensorDataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
    get_linear_schedule_with_warmup,
)

import gadei_ps.learners.torch

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--plain", action="store_true", help="torch's own optimizer")
parser.add_argument("--directory", default="runs/hugging_face", help="for checkpoints")
parser.add_argument("--resume", action="store_true", help="from the newest checkpoint there")
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--samples", type=int, default=512)
args = parser.parse_args()
LENGTH, WORDS = 12, 100
learner = int(os.environ.get("GADEI_PS_LEARNER", "0"))


def make_data(count, seed):
    """Return sentences whose first word determines their label."""
    draw = torch.Generator().manual_seed(seed)
    words = torch.randint(5, WORDS, (count, LENGTH), generator=draw)
    return TensorDataset(words, (words[:, 0] > WORDS // 2).long())


def collate(rows):
    words, labels = map(torch.stack, zip(*rows, strict=True))
    return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": labels}


def accuracy(predicted):
    return {"accuracy": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}


torch.manual_seed(0)
model = BertForSequenceClassification(
    BertConfig(
        vocab_size=WORDS,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
)
if args.plain:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
else:
    optimizer = gadei_ps.learners.torch.Optimizer(model, kind="adamw", lr=2e-3, weight_decay=0.01)
settings = TrainingArguments(
    f"{args.directory}-{learner}",  # each learner keeps checkpoints of its own
    num_train_epochs=args.epochs,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    max_grad_norm=1.0,
    eval_strategy="epoch",
    save_strategy="epoch",
    save_total_limit=2,
    metric_for_best_model="accuracy",
    load_best_model_at_end=True,
    data_seed=learner,  # each learner shuffles in an order of its own
    logging_steps=5,
    report_to=[],
    disable_tqdm=True,
    use_cpu=not torch.cuda.is_available(),
)
steps = 6 * args.samples // 16
trainer = Trainer(
    model,
    settings,
    data_collator=collate,
    train_dataset=make_data(args.samples, 1),
    eval_dataset=make_data(256, 2),
    compute_metrics=accuracy,
    optimizers=(optimizer, get_linear_schedule_with_warmup(optimizer, 8, steps)),
)
trained = trainer.train(resume_from_checkpoint=args.resume or None)
best = trainer.evaluate()
print("training loss", trained.training_loss, "evaluation loss: best", best["eval_loss"])
