"""Keras 3 on PyTorch: a functional model with `compile`, `fit`, `evaluate` and `predict`; it finds the device itself.

With --ap it has the one line; prints losses and accuracies.
"""

import os
import sys

os.environ["KERAS_BACKEND"] = "torch"

import torch

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization()

import keras
import numpy as np
from keras import layers


def pictures(count):
    generator = np.random.default_rng(3)
    classes = generator.integers(0, 5, count)
    x = generator.normal(size=(count, 12, 12, 1)).astype("float32") + classes[:, None, None, None] / 3
    return x.astype("float32"), classes


class KeepsSmall(layers.Layer):
    def call(self, x):
        self.add_loss(1e-2 * keras.ops.mean(keras.ops.square(x)))
        return x


class PrintLosses(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        print(f"loss {logs['loss']:.6f}")


def main():
    keras.utils.set_random_seed(1)
    x, y = pictures(96)
    inputs = keras.Input(shape=(12, 12, 1))
    h = layers.Conv2D(8, 3, activation="relu")(inputs)
    h = layers.MaxPooling2D(2)(h)
    h = layers.Conv2D(16, 3, activation="relu")(h)
    h = layers.Flatten()(h)
    h = KeepsSmall()(layers.Dense(32, activation="relu")(h))
    outputs = layers.Dense(5, activation="softmax")(h)
    model = keras.Model(inputs, outputs)
    model.compile(optimizer=keras.optimizers.Adam(1e-2), loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(x[:64], y[:64], batch_size=16, epochs=2, shuffle=False, verbose=0, callbacks=[PrintLosses()])
    loss, accuracy = model.evaluate(x[64:], y[64:], batch_size=16, verbose=0)
    print(f"held out: loss {loss:.6f}\naccuracy {accuracy:.6f}")
    print(f"predicted {float(model.predict(x[64:72], verbose=0).max(axis=1).mean()):.6f}")


if __name__ == "__main__":
    main()
