"""A head and its greedy decoding as one ONNX file, served without torch: any batch size, any number of candidates."""

import numpy as np
import onnxruntime
import torch

import torchcpl as cpl


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = cpl.CPLHead(dim=32, hidden=32)

    def forward(self, features: torch.Tensor, mask: torch.Tensor) -> cpl.Selection:
        return cpl.greedy(self.head(features, mask), max_len=16)


batch, n = torch.export.Dim("batch"), torch.export.Dim("n")
example = (torch.randn(2, 50, 32), torch.ones(2, 50, dtype=torch.bool))
program = torch.onnx.export(Model().eval(), example, dynamo=True, dynamic_shapes=[{0: batch, 1: n}] * 2)
program.save("model.onnx")

session = onnxruntime.InferenceSession("model.onnx")
features, mask = np.random.default_rng(0).standard_normal((5, 200, 32), dtype=np.float32), np.ones((5, 200), dtype=bool)
indices, lengths, log_prob, _, step_log_prob = session.run(None, {"features": features, "mask": mask})
print("picks:", indices.shape, "of", features.shape)
