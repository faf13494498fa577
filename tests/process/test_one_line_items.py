"""Batches that no tensor has rows of: pictures of unequal size, lists of targets, dataclasses, graphs."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from test_one_line_training import assert_same, on_both
from torch import Tensor, nn

pytestmark = [pytest.mark.rotating, pytest.mark.timeout(200)]  # one more model or plan each


@pytest.fixture(params=["replicate=2", "shard=2"], autouse=True)
def session(request, accelerator):

    return accelerator(request.param, strict=True)


def pictures(device, count=6, seed=0):
    """Pictures of unequal sizes, and the boxes in each."""
    draws = torch.Generator().manual_seed(seed)
    found, targets = [], []
    for number in range(count):
        height, width = (int(side) for side in torch.randint(8, 17, (2,), generator=draws))
        found.append(torch.rand(3, height, width, generator=draws).to(device))
        boxes = torch.rand(1 + (number + seed) % 3, 4, generator=draws)
        labels = torch.randint(0, 3, (len(boxes),), generator=draws)
        targets.append({"boxes": boxes.to(device), "labels": labels.to(device)})
    return found, targets


class Detector(nn.Module):
    """Pads pictures to the largest, samples places of each at random, and divides losses by what it has sampled."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 8, 3, padding=1), nn.Tanh()
        )
        self.scores, self.boxes = nn.Conv2d(8, 3, 1), nn.Conv2d(8, 4, 1)

    def forward(self, images, targets=None):
        height, width = (max(image.shape[dim] for image in images) for dim in (1, 2))
        batch_BCHW = images[0].new_full((len(images), 3, height, width), 0)
        for image, padded in zip(images, batch_BCHW):
            padded[:, : image.shape[1], : image.shape[2]].copy_(image)
        features_BCHW = self.features(batch_BCHW)
        scores_BNK = self.scores(features_BCHW).flatten(2).transpose(1, 2)
        boxes_BN4 = self.boxes(features_BCHW).flatten(2).transpose(1, 2)
        if targets is None:
            kept = [scores.amax(1) > scores.mean() for scores in scores_BNK]
            return [
                {"scores": scores[keep], "boxes": boxes[keep]}
                for scores, boxes, keep in zip(scores_BNK, boxes_BN4, kept)
            ]
        return self.losses(scores_BNK, boxes_BN4, targets)

    def losses(self, scores_BNK, boxes_BN4, targets):
        classes, places = [], []
        for scores_NK, target in zip(scores_BNK, targets):
            positive = (scores_NK[:, 0] > scores_NK[:, 1]).nonzero()[:, 0]
            negative = (scores_NK[:, 0] <= scores_NK[:, 1]).nonzero()[:, 0]
            positive = positive[torch.randperm(len(positive))[: 4 * len(target["boxes"])]]
            negative = negative[torch.randperm(len(negative))[:6]]
            places.append((positive, negative))
            turns = torch.arange(len(positive), device=positive.device) % len(target["labels"])
            classes.append(target["labels"][turns])
        chosen = [torch.cat(pair) for pair in places]
        all_scores_NK = torch.cat([scores[one] for scores, one in zip(scores_BNK, chosen)])
        is_object_N = torch.cat([torch.cat([torch.ones(len(p)), torch.zeros(len(n))]) for p, n in places])
        sampled_N4 = torch.cat([boxes[p] for boxes, (p, _) in zip(boxes_BN4, places)])
        wanted_N4 = torch.cat([target["boxes"].mean(0).expand(len(p), 4) for target, (p, _) in zip(targets, places)])
        is_object_N = is_object_N.to(all_scores_NK.device)
        positive_NK = torch.cat([scores[p] for scores, (p, _) in zip(scores_BNK, places)])
        return {
            "objectness": F.binary_cross_entropy_with_logits(all_scores_NK[:, 0], is_object_N),
            "classes": F.cross_entropy(positive_NK, torch.cat(classes)),
            "boxes": F.smooth_l1_loss(sampled_N4, wanted_N4, reduction="sum") / is_object_N.numel(),
        }


class FocalDetector(Detector):
    """Divides by the number of positive places in the batch, and by the number of pictures."""

    def losses(self, scores_BNK, boxes_BN4, targets):
        wanted_BN = torch.stack(
            [(boxes_N4[:, 0] > 0).long() * (1 + target["labels"][0]) for boxes_N4, target in zip(boxes_BN4, targets)]
        )
        is_positive_BN = wanted_BN > 0
        count = is_positive_BN.sum().item()
        scores = F.cross_entropy(scores_BNK.flatten(0, 1), (wanted_BN - 1).clamp(min=0).flatten(), reduction="none")
        of_each = [
            (boxes.square().mean(-1) * is_positive).sum() / max(1, is_positive.sum().item())
            for boxes, is_positive in zip(boxes_BN4, is_positive_BN)
        ]
        return {"classes": scores.sum() / max(1, count), "boxes": sum(of_each) / len(targets)}


def train(model, device, steps=4):
    model = model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    trace = []
    for step in range(steps):
        losses = model(*pictures(device, seed=step))
        optimizer.zero_grad()
        sum(losses.values()).backward()
        optimizer.step()
        trace.append([losses[name].detach() for name in sorted(losses)])
    return trace, [param.detach() for param in model.parameters()]


@pytest.mark.parametrize("kind", [Detector, FocalDetector])
def test_a_detector_has_the_losses_of_one_device(kind):
    assert_same(*on_both(lambda device: (torch.manual_seed(3), train(kind(), device))[1]), rtol=1e-4, atol=1e-5)


def test_random_numbers_go_on_where_one_device_leaves_them():
    def script(device):
        torch.manual_seed(3)
        train(Detector(), device, steps=2)
        return torch.rand(3)

    assert_same(*on_both(script))


def test_what_is_detected_in_each_picture_comes_back_as_a_list():
    def script(device):
        torch.manual_seed(3)
        model = Detector().to(device).eval()
        with torch.no_grad():
            return [model(pictures(device, count=count)[0]) for count in (6, 5)]

    assert_same(*on_both(script))


@dataclass
class Sample:
    """Sentences of unequal length, and their classes."""

    words: list[Tensor]
    classes: Tensor


class BagOfWords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(20, 8), nn.Linear(8, 3)

    def forward(self, sample):
        scores_BC = self.head(torch.stack([self.words(words).mean(0) for words in sample.words]))
        return F.cross_entropy(scores_BC, sample.classes), scores_BC


def test_a_dataclass_of_sentences():
    def script(device):
        torch.manual_seed(1)
        model = BagOfWords().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trace = []
        for _ in range(3):
            words = [torch.randint(0, 20, (length,)).to(device) for length in (3, 5, 2, 7, 4)]
            loss, scores = model(Sample(words, torch.randint(0, 3, (5,)).to(device)))
            optimizer.zero_grad()
            (loss + scores.square().mean()).backward()
            optimizer.step()
            trace += [loss.detach(), scores.detach()]
        return trace

    assert_same(*on_both(script))


class GraphClassifier(nn.Module):
    """Passes messages along edges, normalises nodes over the batch, and pools the nodes of each graph."""

    def __init__(self, drops=0.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 16), nn.Linear(16, 16)
        self.norm, self.head, self.drops = nn.BatchNorm1d(16), nn.Linear(16, 3), drops

    def forward(self, x, edge_index, batch, batch_size=None):
        x = self.norm(self.pass_on(self.first(x), edge_index)).relu()
        x = F.dropout(x, self.drops, self.training)
        x = self.pass_on(self.second(x), edge_index).tanh()
        graphs = int(batch.max()) + 1 if batch_size is None else batch_size
        sums = x.new_zeros(graphs, x.shape[1]).index_add(0, batch, x)
        return self.head(sums / torch.bincount(batch, minlength=graphs)[:, None]), x

    @staticmethod
    def pass_on(x, edge_index):
        return x + torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]])


def graphs(device, seed, count=6):
    draws = torch.Generator().manual_seed(seed)
    nodes, edges, batch, start = [], [], [], 0
    for number in range(count):
        size = 4 + (number + seed) % 3
        nodes.append(torch.randn(size, 5, generator=draws))
        edges.append(start + torch.randint(0, size, (2, 9), generator=draws))
        batch += [number] * size
        start += size
    labels = torch.randint(0, 3, (count,), generator=draws)
    return [one.to(device) for one in (torch.cat(nodes), torch.cat(edges, 1), torch.tensor(batch), labels)]


class AttendsInGraphs(GraphClassifier):
    """Pads the nodes of each graph to the most that a graph has, as `to_dense_batch` of PyTorch Geometric does."""

    def forward(self, x, edge_index, batch):
        x = self.norm(self.pass_on(self.first(x), edge_index)).relu()
        numbers = torch.bincount(batch)
        most, starts = int(numbers.max()), numbers.cumsum(0) - numbers
        places = batch * most + torch.arange(len(batch)) - starts[batch]
        nodes = torch.zeros(len(numbers) * most, 16).index_copy(0, places, x).view(-1, most, 16)
        are_nodes = torch.zeros(len(nodes) * most, dtype=torch.bool).index_fill(0, places, True).view(-1, 1, most)
        weights = (nodes @ nodes.mT).masked_fill(~are_nodes, -torch.inf).softmax(-1)
        x = x + (F.dropout(weights, self.drops, self.training) @ nodes).flatten(0, 1)[places]
        return self.head(torch.zeros(len(numbers), 16).index_add(0, batch, x)), x


@pytest.mark.parametrize(
    "kind, drops, told",
    [
        (GraphClassifier, 0.0, {}),
        (GraphClassifier, 0.3, {}),
        (GraphClassifier, 0.0, {"batch_size": 6}),
        (AttendsInGraphs, 0.3, {}),
    ],
    ids=str,
)
def test_flat_graphs(kind, drops, told):
    def script(device):
        torch.manual_seed(2)
        model = kind(drops).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trace = []
        for step in range(4):
            *tensors, labels = graphs(device, step)
            scores, nodes = model(*tensors, **told)
            loss = F.cross_entropy(scores, labels) + nodes.square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trace += [loss.detach(), nodes.detach()]
        return trace, model.norm.running_var

    assert_same(*on_both(script), rtol=1e-4, atol=1e-5)


class BagClassifier(nn.Module):
    """Texts of unequal length, one behind the other, with where each begins; optionally weighed, with a vector each."""

    def __init__(self, *, is_weighed: bool) -> None:
        super().__init__()
        mode = "sum" if is_weighed else "mean"
        self.words = nn.EmbeddingBag(30, 8, mode=mode, include_last_offset=is_weighed)
        self.dropout, self.head = nn.Dropout(0.2), nn.Linear(10 if is_weighed else 8, 3)

    def forward(self, words, offsets, weights=None, dense=None):
        found = self.words(words, offsets, per_sample_weights=weights)
        return self.head(self.dropout(found if dense is None else torch.cat([found, dense], 1)))


class OfPackedSequences(nn.Module):
    """Gets words that the script has packed, and forgets the order of their lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.recurrent, self.head = (
            nn.Embedding(20, 8),
            nn.LSTM(8, 6, 2, bidirectional=True),
            nn.Linear(12, 3),
        )

    def forward(self, packed):
        embedded = packed._replace(data=self.words(packed.data))
        _, (states_NBH, _) = self.recurrent(embedded)
        return self.head(torch.cat([states_NBH[-2], states_NBH[-1]], 1))


class OfTables(nn.Module):
    """A recommender: bags of numbers of several tables, beside numbers of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(20, 6, mode="sum") for _ in range(3))
        self.dense, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, dense_BF, offsets_TB, words):
        bags = [table(words[k], offsets_TB[k]) for k, table in enumerate(self.tables)]
        return self.head(torch.tanh(self.dense(dense_BF) * sum(bags)))


def sequences_of(rows, longest):
    return [torch.randint(0, 20, (int(length),)) for length in torch.randint(1, longest, (rows,))]


@pytest.mark.parametrize("model_class", [OfPackedSequences, OfTables])
def test_packed_sequences_and_tables_are_split(model_class):
    def script(device):
        torch.manual_seed(0)
        model = model_class().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        trace = []
        for rows, longest in ((6, 7), (6, 5), (5, 6)):
            if model_class is OfPackedSequences:
                scores = model(nn.utils.rnn.pack_sequence(sequences_of(rows, longest), enforce_sorted=False).to(device))
            else:
                tables = [sequences_of(rows, longest) for _ in range(3)]
                lengths_TB = torch.tensor([[len(one) for one in table] for table in tables])
                words = [torch.cat(table).to(device) for table in tables]
                scores = model(torch.randn(rows, 4).to(device), (lengths_TB.cumsum(1) - lengths_TB).to(device), words)
            loss = F.cross_entropy(scores, torch.randint(0, 3, (rows,)).to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trace += [loss.detach(), scores.detach()]
        return [*trace, *model.state_dict().values()]

    assert_same(*on_both(script), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_weighed", [False, True])
def test_bags_of_words_are_cut_by_their_offsets(is_weighed):
    draws = torch.Generator().manual_seed(0)
    batches = []
    for count in (6, 9, 5):
        lengths = torch.randint(0 if is_weighed else 1, 7, (count,), generator=draws)
        ends = lengths.cumsum(0)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), ends if is_weighed else ends[:-1]])
        words = torch.randint(0, 30, (int(ends[-1]),), generator=draws)
        beside = (torch.rand(len(words), generator=draws), torch.randn(count, 2, generator=draws)) if is_weighed else ()
        batches.append((words, offsets, *beside, torch.randint(0, 3, (count,), generator=draws)))

    def train(device):
        model = BagClassifier(is_weighed=is_weighed).to(device)
        optimizer, trace = torch.optim.SGD(model.parameters(), lr=0.5), []
        for *given, labels in batches:
            loss = F.cross_entropy(model(*(one.to(device) for one in given)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trace.append(loss.detach())
        return trace, [parameter.detach() for parameter in model.parameters()]

    assert_same(*on_both(train))
