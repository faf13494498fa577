"""The words of docs/reference/parameter-guide.md, in each language of the site.

Decides how the page reads. Must not know plans or figures. Every language has the same keys; headings of another
language than English carry the English anchor.
"""

from __future__ import annotations

Words = dict[str, str]

ENGLISH: Words = {
    "head": """\
# Fine-tuning parameter guide

<!-- Written by scripts/parameter_guide.py. Change that. -->

Find your model and the accelerator nearest to yours: the tables say which plan `moreh-ap plan` gives, how much memory
it needs on each device, and how many tokens a second to expect. Ask for any other batch, length or machine yourself:

```sh
moreh-ap plan Llama3-8B --devices 16xMI250 --global-batch 128 --seq-len 1024 --explain
```

Every figure of ours is a prediction; none was measured. [How the planner predicts](../planner.md#measured-errors) says
how far off predictions are where something was measured.

- **GiB** is what the allocator of the fullest device reserves. A plan may fill {ratio} per cent of a device, as the one
  line's default says.
- **MFU** is the part of the devices' peak rate that the model's own operations use.
""",
    "own": """\
## Models and accelerators

A step has {tokens} tokens: 256 rows of 1,024, or 64 rows of 4,096. Where both get the same plan they share a row. The
percentage behind tokens a second is MFU.
""",
    "own_columns": "| devices | plan | GiB | tokens/s at 1,024 | tokens/s at 4,096 |",
    "beside": """\
## Beside the published guide

The platform publishes the memory and time of six models on its accelerators, where an MI250 counts as two devices of
64 GB. It publishes memory as the sum over all devices, in MiB, and so do we here. Its plans are not published. A larger
figure need not mean that more memory is needed: the plan may recompute less, and a program may reserve more than it
uses.
""",
    "memory_columns": "| model, accelerator | batch x length | plan | GiB | all devices, MiB | published, MiB |",
    "times": """\
### Time

The platform publishes the minutes of a whole run, without its data set and number of epochs. You can therefore not
compare seconds a step, but you can compare how much faster a larger accelerator is. "Times as fast" is relative to the
model's first row.
""",
    "times_columns": "| model, accelerator | batch x length | s / step | tokens/s | times as fast "
    "| published, min | published, times as fast |",
    "speeds": """\
## Beside the published speeds

The platform's tutorials state the speed of some models, and for three of them the selected plan. "Platform's plan" is
that plan in our words, predicted for our runtime; "our plan" is the one that our planner chooses. "Measured" is what
the platform states for its own program on its own machines, so a difference is not the error of a prediction alone.
""",
    "speeds_columns": "| model, devices, batch | | plan | GiB | tokens/s |",
    "theirs": "platform's plan, predicted",
    "ours": "our plan, predicted",
    "measured": "measured by the platform",
    "nothing_fits": "nothing fits",
    "flavours_columns": "| flavour (devices) | batch | a device holds | tokens/s |",
    "does_not_fit": ", does not fit",
}

KOREAN: Words = {
    "head": """\
# LLM 미세 조정 파라미터 안내 {{ #fine-tuning-parameter-guide }}

<!-- Written by scripts/parameter_guide.py. Change that. -->

사용할 모델과 가장 비슷한 가속기를 찾아보십시오. 표에는 `moreh-ap plan`이 고르는 플랜, 장치마다 필요한 메모리, 예상되는
초당 토큰 수가 있습니다. 다른 배치, 길이, 장비는 직접 물어볼 수 있습니다.

```sh
moreh-ap plan Llama3-8B --devices 16xMI250 --global-batch 128 --seq-len 1024 --explain
```

이 패키지에 대한 수치는 모두 예측이며, 측정한 값은 없습니다. 예측이 측정값과 얼마나 다른지는
[플래너의 예측 방법](../planner.md#measured-errors)에서 설명합니다.

- **GiB**는 가장 많이 찬 장치의 할당자가 예약하는 양입니다. 한 줄의 기본값에 따라 플랜은 장치 메모리의 {ratio}퍼센트까지
  채울 수 있습니다.
- **MFU**는 장치의 최대 연산 속도 중 모델 자체의 연산이 쓰는 비율입니다.
""",
    "own": """\
## 모델과 가속기 {{ #models-and-accelerators }}

한 스텝은 {tokens}토큰이며, 1,024토큰짜리 행 256개이거나 4,096토큰짜리 행 64개입니다. 둘의 플랜이 같으면 한 행에 함께
적었습니다. 초당 토큰 수 뒤의 퍼센트는 MFU입니다.
""",
    "own_columns": "| 장치 | 플랜 | GiB | 초당 토큰 수, 길이 1,024 | 초당 토큰 수, 길이 4,096 |",
    "beside": """\
## 공개된 안내와 비교 { #beside-the-published-guide }

플랫폼은 자체 가속기에서 여섯 모델이 쓰는 메모리와 걸리는 시간을 공개합니다. 여기서 MI250 하나는 64 GB 장치 2개입니다.
플랫폼은 메모리를 모든 장치의 합(MiB)으로 공개하므로, 여기서도 그렇게 적었습니다. 플랫폼의 플랜은 공개되지 않았습니다.
수치가 더 크다고 해서 메모리가 더 필요한 것은 아닙니다. 재계산을 덜 하는 플랜이거나, 프로그램이 쓰는 것보다 많이
예약했을 수 있습니다.
""",
    "memory_columns": "| 모델, 가속기 모델 | 배치 x 길이 | 플랜 | GiB | 모든 장치, MiB | 공개된 값, MiB |",
    "times": """\
### 시간 { #time }

플랫폼은 실행 전체에 걸린 시간을 분으로 공개하며, 데이터셋과 에폭 수는 밝히지 않습니다. 그래서 스텝당 초는 비교할 수
없지만, 더 큰 가속기에서 얼마나 빨라지는지는 비교할 수 있습니다. "배속"은 모델의 첫 번째 행을 기준으로 합니다.
""",
    "times_columns": "| 모델, 가속기 모델 | 배치 x 길이 | 초 / 스텝 | 초당 토큰 수 | 배속 "
    "| 공개된 값, 분 | 공개된 값, 배속 |",
    "speeds": """\
## 공개된 속도와 비교 { #beside-the-published-speeds }

플랫폼의 튜토리얼에는 몇 가지 모델의 속도가 나와 있고, 그중 세 가지에는 선택된 플랜도 나와 있습니다. "플랫폼의 플랜"은
그 플랜을 이 패키지의 표기로 적고 이 패키지의 런타임에 대해 예측한 것입니다. "이 플래너의 플랜"은 이 패키지의 플래너가
고르는 플랜입니다. "플랫폼의 측정값"은 플랫폼이 자체 장비에서 자체 프로그램으로 측정하여 밝힌 값이므로, 차이가 모두
예측의 오차인 것은 아닙니다.
""",
    "speeds_columns": "| 모델, 장치, 배치 | | 플랜 | GiB | 초당 토큰 수 |",
    "theirs": "플랫폼의 플랜, 예측",
    "ours": "이 플래너의 플랜, 예측",
    "measured": "플랫폼의 측정값",
    "nothing_fits": "들어가는 플랜 없음",
    "flavours_columns": "| 가속기 모델(장치 수) | 배치 | 장치당 메모리 | 초당 토큰 수 |",
    "does_not_fit": ", 들어가지 않음",
}

LANGUAGES = {"": ENGLISH, ".ko": KOREAN}
"""What stands before `.md` in the name of the page: its words."""
