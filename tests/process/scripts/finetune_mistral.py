"""A fine-tuning script as users write it for one GPU: a data set saved with torch, the one line after the model."""

import torch
from transformers import AdamW, AutoModelForCausalLM

torch.manual_seed(0)
model = AutoModelForCausalLM.from_pretrained("./mistral")
dataset = torch.load("mistral_dataset.pt")
loader = torch.utils.data.DataLoader(dataset, batch_size=5, shuffle=True, drop_last=True)

torch.moreh.option.enable_advanced_parallelization(mixed_precision=False)
model.train()
model.cuda()
optim = AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(optim, lambda step: 0.9**step)

for step, batch in enumerate(loader):
    batch = {name: tensor.cuda() for name, tensor in batch.items()}
    loss = model(**batch, use_cache=False)[0]
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optim.step()
    scheduler.step()
    model.zero_grad(set_to_none=True)
    print(f"{step} loss {loss.item():.6f}", flush=True)

model.to("cpu").save_pretrained("./tuned")
