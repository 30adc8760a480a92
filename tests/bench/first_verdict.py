"""A script of a user's: from nothing to a first verdict. Its data costs no import."""

import torch
from torch import nn

from equivtest import Experiment, Loss, Plan, check


def squared_error(model, batch):
    x, y = batch
    return Loss(total=(model(x).squeeze(1) - y).square().sum(), count=len(y))


def main():
    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    experiment = Experiment(
        model=lambda: nn.Linear(3, 1),
        data=list(zip(x, x.sum(1), strict=True)),
        loss=squared_error,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )
    verdict = check(experiment, Plan(m=4, A=4, D=2))
    assert verdict.status == "equivalent", verdict.explain()


if __name__ == "__main__":
    main()
