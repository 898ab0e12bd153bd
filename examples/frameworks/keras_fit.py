"""Keras 3 with a job's optimizer: a classifier with batch norm, on Keras's torch backend.

python keras_fit.py --plain                                      # Keras alone
gadei-ps run fit --learners 2 -- python keras_fit.py             # two learners
"""

import argparse
import os

os.environ.setdefault("KERAS_BACKEND", "torch")  # before the first import of keras

import keras
import numpy as np

import gadei_ps.learners.keras

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--plain", action="store_true", help="Keras's own optimizer")
parser.add_argument("--optimizer", choices=("sgd", "momentum", "adamw"), default="adamw")
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--samples", type=int, default=2048)
args = parser.parse_args()


def make_data(count, seed):
    inputs = np.random.default_rng(seed).standard_normal((count, 20), np.float32)
    return inputs, (np.linalg.norm(inputs[:, :10], axis=1) > np.linalg.norm(inputs[:, 10:], axis=1))


rate = keras.optimizers.schedules.CosineDecay(2e-2, 2 * args.epochs * args.samples // 16)
optimizers = {
    "sgd": keras.optimizers.SGD(0.2),
    "momentum": keras.optimizers.SGD(2e-2, momentum=0.9, nesterov=True, clipnorm=1.0),
    "adamw": keras.optimizers.AdamW(rate, gradient_accumulation_steps=2),
}
keras.utils.set_random_seed(0)
layers = keras.layers
model = keras.Sequential(
    [
        keras.Input((20,)),
        layers.Dense(64, use_bias=False, name="inner"),
        layers.BatchNormalization(name="norm"),
        layers.ReLU(),
        layers.Dense(1, name="outer"),
    ]
)
model.compile(
    optimizer=optimizers[args.optimizer],
    loss=keras.losses.BinaryCrossentropy(from_logits=True),
    metrics=[keras.metrics.BinaryAccuracy(threshold=0.0)],
)
# Each learner shuffles in an order of its own.
keras.utils.set_random_seed(int(os.environ.get("GADEI_PS_LEARNER", "0")))
best = keras.callbacks.EarlyStopping(patience=3, restore_best_weights=True)
model.fit(
    *make_data(args.samples, 1),
    batch_size=16,
    epochs=args.epochs,
    validation_data=make_data(512, 2),
    callbacks=[best] if args.plain else [best, gadei_ps.learners.keras.Learner()],
    verbose=0,
)
loss, accuracy = model.evaluate(*make_data(512, 2), verbose=0)
print("validation loss", loss, "accuracy", accuracy)
