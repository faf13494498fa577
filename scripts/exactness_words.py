"""The words of docs/reference/exactness.md, in each language of the site.

Decides how the page reads. Must not know results. Every language has the same keys; headings of another language than
English carry the English anchor.
"""

from __future__ import annotations

Words = dict[str, str]

ENGLISH: Words = {
    "head": """\
# Families and plans

<!-- Written by scripts/exactness_page.py from exactness.json. Change those. -->

Each cell trains one model twice: in one process without the one line, and with it under a plan, on workers that are CPU
processes. {num_cells} cells: {counts}.

The models are small (four blocks of width 64, four heads, a vocabulary of 101) and start from random weights; dropout
is off. Five steps with `clip_grad_norm_`, float32. A batch has nine rows, the last one seven, padded to different
lengths; one row has a single token. AdamW has an epsilon of 1e-6 ([why](../exactness.md#how-it-is-tested)); the user's
own transformer and the convolutional networks train with SGD.

| compared | relative to | limit |
|---|---|---|
| the loss of every step | the loss | 1e-5 |
| what `clip_grad_norm_` returns, every step | the norm | 1e-4 |
| every gradient of step 1, before and after clipping | the largest element of the tensor, but at least a thousandth \
of the model's largest | 1e-4 |
| every weight and buffer after five steps | the largest element of the tensor | 1e-4 |

In bfloat16 only the losses are compared, to 2 %.

How it was run: {how}. To run it again:

```sh
make test-matrix
python scripts/exactness_page.py
```
""",
    "legend": """\
A number is the largest difference of its row and column. "refused": the plan ends with a `PlanError` that says why,
which is what the tests ask for. "unsplit": this model does not compute every row independently, so every device
computes the whole batch; exact, and no faster than one device ([glossary](glossary.md#unsplit)). **wrong** and
**failed** are open. An empty cell has not run.
""",
    "plans": "## Plans\n\n"
    "| plan | as it is written | families | refused | largest loss difference | gradient | weight |",
    "held": "{held} of {asked}",
    "open": "## Open\n\n| family | plan | verdict | what happens |",
    "refusals": "## Refused\n\n| family | plan | the error |",
    "loss": "## Losses\n\n| family |",
    "gradient": "## Gradients\n\n| family |",
    "weight": "## Weights\n\n| family |",
    "exact": "exact",
    "refused": "refused",
    "wrong": "wrong",
    "failed": "failed",
    "whole": "unsplit",
    "count": "{number} {verdict}",
    "days": "{first} to {last}",
    "minutes": "{minutes:.0f} minutes",
}

KOREAN: Words = {
    "head": """\
# 모델 계열과 플랜 {{ #families-and-plans }}

<!-- Written by scripts/exactness_page.py from exactness.json. Change those. -->

각 셀에서는 모델 하나를 두 번 학습합니다. 먼저 한 줄 없이 프로세스 하나에서, 다음에는 한 줄을 넣고 CPU 프로세스인
워커에서 그 셀의 플랜으로 학습합니다. 셀은 {num_cells}개입니다: {counts}.

모델은 작고(폭 64의 블록 네 개, 헤드 네 개, 어휘 101개) 임의의 가중치에서 시작하며 드롭아웃은 끕니다. float32로
다섯 스텝을 학습하고 `clip_grad_norm_`으로 클리핑합니다. 배치는 9행이고 마지막 배치는 7행이며, 서로 다른 길이로
패딩되어 있습니다. 한 행에는 토큰이 하나뿐입니다. AdamW의 엡실론은 1e-6이고([이유](../exactness.md#how-it-is-tested)),
사용자가 직접 만든 트랜스포머와 합성곱 신경망은 SGD로 학습합니다.

| 비교하는 것 | 기준 | 한계 |
|---|---|---|
| 모든 스텝의 손실 | 손실 | 1e-5 |
| 모든 스텝에서 `clip_grad_norm_`이 반환하는 것 | 노름 | 1e-4 |
| 첫 스텝의 모든 기울기, 클리핑 전과 후 | 텐서에서 가장 큰 원소. 단, 적어도 모델에서 가장 큰 것의 1000분의 1 | 1e-4 |
| 다섯 스텝 뒤의 모든 가중치와 버퍼 | 텐서에서 가장 큰 원소 | 1e-4 |

bfloat16에서는 손실만 2 %까지 비교합니다.

실행한 환경: {how}. 다시 실행하려면 다음과 같이 합니다.

```sh
make test-matrix
python scripts/exactness_page.py
```
""",
    "legend": """\
표의 수는 그 행과 열에서 가장 큰 차이입니다. "거부": 플랜이 이유를 알려 주는 `PlanError`로 끝나며, 이것이 테스트가
요구하는 결과입니다. "분할 안 함": 이 모델은 행을 서로 독립적으로 계산하지 않으므로 모든 장치가 배치 전체를 계산합니다.
정확하지만 장치 하나보다 빠르지 않습니다([용어집](glossary.md#unsplit)). **틀림**과 **실패**는 해결되지 않은 것입니다.
빈 셀은 실행하지 않은 것입니다.
""",
    "plans": "## 플랜 { #plans }\n\n| 플랜 | 적는 방법 | 모델 계열 | 거부 | 손실의 가장 큰 차이 | 기울기 | 가중치 |",
    "held": "{held}/{asked}",
    "open": "## 해결되지 않은 것 { #open }\n\n| 모델 계열 | 플랜 | 판정 | 일어나는 일 |",
    "refusals": "## 거부되는 것 { #refused }\n\n| 모델 계열 | 플랜 | 오류 |",
    "loss": "## 손실 { #losses }\n\n| 모델 계열 |",
    "gradient": "## 기울기 { #gradients }\n\n| 모델 계열 |",
    "weight": "## 가중치 { #weights }\n\n| 모델 계열 |",
    "exact": "정확",
    "refused": "거부",
    "wrong": "틀림",
    "failed": "실패",
    "whole": "분할 안 함",
    "count": "{verdict} {number}개",
    "days": "{first}부터 {last}까지",
    "minutes": "{minutes:.0f}분",
}

LANGUAGES = {"": ENGLISH, ".ko": KOREAN}
"""What stands before `.md` in the name of the page: its words."""
