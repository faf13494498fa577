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

Which plan `moreh-ap plan` gives, what it is predicted to hold and how fast it is predicted to be. Everything here is a
prediction for this package's runtime; none of it was measured. How good predictions are where something was measured
is on [another page](../planner.md). A plan may fill {ratio} per cent of a device, as the one line's default says. Any
cell can be asked for anew:

```sh
moreh-ap plan Llama3-8B --devices 16xMI250 --global-batch 128 --seq-len 1024 --explain
```

"GiB" is what the allocator of the fullest device reserves. MFU is the part of the devices' peak rate that the model's
own operations use.
""",
    "beside": """\
## Beside the published guide

The platform publishes memory and time for six models on its accelerators, an MI250 being two devices of 64 GB. What
can be compared:

- **Memory** is published as the sum over all devices, in MiB; so is ours here. The platform's plans are not published,
  and memory that a program reserves is not memory that it needs: a larger figure may be a plan that recomputes less.
- **Time** is published in minutes of a whole run whose data set and number of epochs are not stated, so seconds a step
  cannot be compared. How much faster the same model trains on a larger accelerator can, if its rows have the same data:
  "times as fast" is relative to the model's first row, in tokens a second.
""",
    "beside_columns": "| model | flavour | batch x length | plan | GiB | all devices MiB | published MiB "
    "| s / step | tokens/s | times as fast | published, min | published, times as fast |",
    "speeds": """\
## Beside the published speeds

The platform's tutorials state speeds for some models, and for three of them the selected plan. "Theirs" is that plan
in our words, as our runtime is predicted to run it; "ours" the plan that our planner chooses. The platform measured its
own program on its own machines, so a difference is not an error of the prediction alone.
""",
    "speeds_columns": "| model | devices | batch | published, tokens/s "
    "| theirs | GiB | tokens/s | ours | GiB | tokens/s |",
    "own": """\
## Models and accelerators

Batches of 256 rows of 1,024 tokens and of 64 rows of 4,096.
""",
    "own_columns": "| model | devices | batch x length | plan | GiB | s / step | tokens/s | MFU |",
    "nothing_fits": "nothing fits",
    "flavours_columns": "| flavour (devices) | batch | a device holds | tokens/s |",
    "not_published": "not published",
    "does_not_fit": ", does not fit",
}

KOREAN: Words = {
    "head": """\
# LLM 미세 조정 파라미터 안내 {{ #fine-tuning-parameter-guide }}

<!-- Written by scripts/parameter_guide.py. Change that. -->

`moreh-ap plan`이 어떤 플랜을 알려 주는지, 그 플랜이 메모리를 얼마나 쓰고 얼마나 빠를 것으로 예측되는지를 보여 줍니다.
여기에 있는 수치는 모두 이 패키지의 런타임에 대한 예측이며, 측정한 값은 없습니다. 예측이 측정한 값과 얼마나 맞는지는
[다른 페이지](../planner.md)에서 설명합니다. 플랜은 장치 메모리의 {ratio}퍼센트까지 채울 수 있고, 이는 한 줄의
기본값입니다. 모든 셀은 다음과 같이 다시 물어볼 수 있습니다.

```sh
moreh-ap plan Llama3-8B --devices 16xMI250 --global-batch 128 --seq-len 1024 --explain
```

"GiB"는 가장 많이 찬 장치의 할당자가 예약하는 양입니다. MFU는 장치의 최대 연산 속도 중 모델 자체의 연산이 쓰는
비율입니다.
""",
    "beside": """\
## 공개된 안내와 비교 { #beside-the-published-guide }

플랫폼은 자체 가속기에서 여섯 모델이 쓰는 메모리와 걸리는 시간을 공개합니다. MI250 하나는 64 GB 장치 두 개입니다.
비교할 수 있는 것은 다음과 같습니다.

- **메모리**는 모든 장치의 합을 MiB로 공개하며, 여기의 값도 그렇습니다. 플랫폼의 플랜은 공개되지 않았고, 프로그램이
  예약하는 메모리와 프로그램에 필요한 메모리는 다릅니다. 수가 더 크다면 덜 재계산하는 플랜이어서일 수 있습니다.
- **시간**은 실행 전체에 걸린 분으로 공개하며, 그 데이터셋과 에폭 수는 나와 있지 않으므로 스텝당 초는 비교할 수
  없습니다. 같은 모델이 더 큰 가속기에서 얼마나 빨리 학습하는지는 그 행들의 데이터가 같다면 비교할 수 있습니다.
  "배속"은 모델의 첫 번째 행을 기준으로 하며, 초당 토큰으로 계산합니다.
""",
    "beside_columns": "| 모델 | 가속기 모델 | 배치 x 길이 | 플랜 | GiB | 모든 장치 MiB | 공개된 MiB "
    "| 초 / 스텝 | 토큰/초 | 배속 | 공개된 분 | 공개된 배속 |",
    "speeds": """\
## 공개된 속도와 비교 { #beside-the-published-speeds }

플랫폼의 튜토리얼에는 몇 가지 모델의 속도가 나와 있고, 그중 세 가지에는 선택된 플랜도 나와 있습니다. "플랫폼의 플랜"은
그 플랜을 이 패키지의 표기로 적은 것으로, 이 패키지의 런타임이 실행할 때의 예측입니다. "이 플래너의 플랜"은 이 패키지의
플래너가 고르는 플랜입니다. 플랫폼은 자체 프로그램을 자체 장비에서 측정했으므로, 차이가 모두 예측의 오차인 것은
아닙니다.
""",
    "speeds_columns": "| 모델 | 장치 | 배치 | 공개된 토큰/초 "
    "| 플랫폼의 플랜 | GiB | 토큰/초 | 이 플래너의 플랜 | GiB | 토큰/초 |",
    "own": """\
## 모델과 가속기 { #models-and-accelerators }

1,024 토큰짜리 행 256개의 배치와, 4,096 토큰짜리 행 64개의 배치입니다.
""",
    "own_columns": "| 모델 | 장치 | 배치 x 길이 | 플랜 | GiB | 초 / 스텝 | 토큰/초 | MFU |",
    "nothing_fits": "들어가는 플랜 없음",
    "flavours_columns": "| 가속기 모델(장치 수) | 배치 | 장치당 메모리 | 초당 토큰 수 |",
    "not_published": "공개되지 않음",
    "does_not_fit": ", 들어가지 않음",
}

LANGUAGES = {"": ENGLISH, ".ko": KOREAN}
"""What stands before `.md` in the name of the page: its words."""
