"""A graph convolutional network, after gcn of pytorch/examples: Adam with weight decay, full batch.

python gcn.py --plain                             # torch alone
gadei-ps run graph --learners 2 -- python gcn.py  # two learners, which differ in their dropout
"""

import argparse
import os
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Adam

import gadei_ps.learners.torch


class GraphConv(nn.Module):
    def __init__(self, input_dim, output_dim):
        super().__init__()
        self.kernel = nn.Parameter(torch.Tensor(input_dim, output_dim))
        nn.init.xavier_normal_(self.kernel)
        self.bias = nn.Parameter(torch.zeros(output_dim))

    def forward(self, input_tensor, adj_mat):
        return torch.spmm(adj_mat, torch.mm(input_tensor, self.kernel)) + self.bias


class GCN(nn.Module):
    def __init__(self, input_dim, hidden_dim, output_dim, dropout_p):
        super().__init__()
        self.gc1 = GraphConv(input_dim, hidden_dim)
        self.gc2 = GraphConv(hidden_dim, output_dim)
        self.dropout = nn.Dropout(dropout_p)

    def forward(self, input_tensor, adj_mat):
        x = F.relu(self.gc1(input_tensor, adj_mat))
        return F.log_softmax(self.gc2(self.dropout(x), adj_mat), dim=1)


def citations(nodes):
    """Return papers of seven fields that cite mostly their own: features, labels, adjacency."""
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 7, (nodes,), generator=draw)
    features = F.one_hot(labels, 50).float() + torch.rand(nodes, 50, generator=draw)
    same = labels.view(-1, 1) == labels
    chance = torch.where(same, 8 / nodes, 0.7 / nodes)
    edges = torch.rand(nodes, nodes, generator=draw) < chance
    adj_mat = (edges | edges.T).float() + torch.eye(nodes)
    degree = adj_mat.sum(dim=1).rsqrt()
    adj_mat = degree.view(-1, 1) * adj_mat * degree
    return features / features.sum(dim=1, keepdim=True) * 10, labels, adj_mat.to_sparse()


def test(model, criterion, input, target, mask):
    model.eval()
    with torch.no_grad():
        output = model(*input)[mask]
        loss = criterion(output, target[mask])
        acc = (output.argmax(dim=1) == target[mask]).float().mean()
    return loss.item(), acc.item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plain", action="store_true", help="torch's own optimizer")
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--l2", type=float, default=5e-4)
    parser.add_argument("--dropout-p", type=float, default=0.5)
    parser.add_argument("--hidden-dim", type=int, default=16)
    parser.add_argument("--nodes", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()

    # Each learner of a job drops units of its own.
    torch.manual_seed(args.seed + int(os.environ.get("GADEI_PS_LEARNER", "0")))
    features, labels, adj_mat = citations(args.nodes)
    idx = torch.randperm(args.nodes, generator=torch.Generator().manual_seed(0))
    idx_test, idx_train = idx[: args.nodes // 2], idx[args.nodes // 2 :]

    gcn = GCN(features.shape[1], args.hidden_dim, 7, args.dropout_p)
    if args.plain:
        optimizer = Adam(gcn.parameters(), lr=args.lr, weight_decay=args.l2)
    else:
        optimizer = gadei_ps.learners.torch.Optimizer(
            gcn, kind="adam", lr=args.lr, weight_decay=args.l2
        )
    criterion = nn.NLLLoss()

    start = time.perf_counter()
    for epoch in range(args.epochs):
        gcn.train()
        optimizer.zero_grad()
        output = gcn(features, adj_mat)
        loss = criterion(output[idx_train], labels[idx_train])
        loss.backward()
        optimizer.step()
        if epoch % 20 == 19:
            print(f"epoch {epoch + 1}: loss {loss.item():.4f}", flush=True)
    print(f"{args.epochs * len(idx_train)} samples in {time.perf_counter() - start:.3f} s")
    loss_test, acc_test = test(gcn, criterion, (features, adj_mat), labels, idx_test)
    print(f"test accuracy {acc_test:.4f}")
    print(f"test loss {loss_test:.6f}", flush=True)
