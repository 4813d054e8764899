"""`python -m graph_passes show`: tables, bytes, drawings, and one sentence for a mistake."""

import math
import re
import xml.etree.ElementTree as ET
from types import SimpleNamespace

import pytest

from common.mxnet_compat import mx
from graph_passes import Graph, Ref, passes, pipeline
from graph_passes.__main__ import main
from graph_passes.choice import Choice, fewest, repeatable
from graph_passes.drawing import draw_svg
from graph_passes.executors.cuda import training_step
from graph_passes.show import forward_bytes
from train.models.resnet import resnet

SVG = "{http://www.w3.org/2000/svg}"


def boxes(svg):
    """(operator and name, border width, centre) of each box, checked to be inside the picture."""
    root = ET.fromstring(svg)
    width, height = float(root.get("width")), float(root.get("height"))
    found = []
    for group in root.iter(f"{SVG}g"):
        rect = group.find(f"{SVG}rect")
        x, y, w, h = (float(rect.get(key)) for key in ("x", "y", "width", "height"))
        assert 0 <= x <= x + w <= width and 0 <= y <= y + h <= height
        found.append((group.find(f"{SVG}title").text, float(rect.get("stroke-width")), (x, y, w, h)))
    return found


def fused(graph):
    return passes.bn_relu(passes.bn_add_relu(graph))


@pytest.mark.parametrize("depth", [18, 50, 152])
def test_drawing_of_a_resnet(depth):
    before = Graph.from_json(resnet(depth).tojson())
    after = fused(before)
    shapes = after.infer_shapes({"data": (4, 224, 224, 3)})
    svg = draw_svg(after, "a <title> & more", shapes)
    drawn = boxes(svg)
    assert sorted(text for text, _, _ in drawn) == sorted(
        f"{node.op} {node.name}" for node in after if not node.is_variable
    )
    highlighted = [text for text, border, _ in drawn if border > 2]
    assert len(highlighted) == after.operators()["BatchNormRelu"] + after.operators()["BatchNormAddRelu"]
    for i, (_, _, (x, y, w, h)) in enumerate(drawn):  # no two boxes overlap
        for _, _, (x2, y2, w2, h2) in drawn[:i]:
            assert x + w <= x2 or x2 + w2 <= x or y + h <= y2 or y2 + h2 <= y
    assert "4×56×56×64" in svg
    assert len(boxes(draw_svg(before, "before"))) == before.operators().total()


@pytest.mark.parametrize("name", ["densenet121", "inception_v3", "mobilenet_v2_0_25"])
def test_drawing_of_other_networks(name):
    graph = Graph.from_json(getattr(mx.gluon.model_zoo.vision, name)()(mx.sym.var("data")).tojson())
    assert len(boxes(draw_svg(graph, name))) == graph.operators().total()


def test_bytes_that_fusion_saves():
    """Each tensor that is no longer written to memory saves a write and a read: counted here from the pattern alone."""
    before = Graph.from_json(resnet(50).tojson())
    shapes = before.infer_shapes({"data": (8, 96, 96, 3)})
    vanished = 0
    for node in before:
        if (node.op == "BatchNorm" and "shortcut" not in node.name) or node.op == "elemwise_add":
            vanished += math.prod(shapes[Ref(node.name)])
    after = fused(before)
    saved = forward_bytes(before, shapes, 2) - forward_bytes(after, after.infer_shapes({"data": (8, 96, 96, 3)}), 2)
    assert saved == 2 * 2 * vanished


def test_show_a_network_of_the_zoo(capsys, tmp_path):
    arguments = ["show", "--model", "resnet50_v1", "--batch-size", "2", "--image-size", "64", "--inference"]
    assert main([*arguments, "--output", str(tmp_path / "new")]) == 0
    output = capsys.readouterr().out
    for row in (r"layout\W+53 convolutions", r"bn_relu\W+33 ", r"bn_add_relu\W+16 ", r" add_relu\W+0 ",
                r"fold_bn\W+53 convolutions", r"precision\W+all", r"BatchNorm\W+53\W+\n"):
        assert re.search(row, output), row
    after = Graph.load(tmp_path / "new" / "after.json")
    kinds = after.operators()
    assert kinds["StemPool"] == 1
    assert kinds["Conv1x1ForwardSumRelu"] + kinds["Conv1x1Pair"] == 12, "either of which is a node less"
    assert kinds["ConvolutionAddRelu"] == 16 - 4 - 8
    assert kinds["ConvolutionRelu"] + kinds["Convolution"] == 32 - 8, "with a pair in place of a sum a shortcut is left"
    assert len(boxes((tmp_path / "new" / "after.svg").read_text())) == kinds.total()
    assert len(boxes((tmp_path / "new" / "before.svg").read_text())) == 53 + 53 + 49 + 16 + 2 + 1
    stages = {path.name: len(boxes(path.read_text())) for path in (tmp_path / "new").glob("[0-9]*.svg")}
    assert stages["01_layout.svg"] == stages["02_remove_dropout.svg"] == stages["03_bn_add_relu.svg"] + 2 * 16 == 174
    assert max(stages) == "11_cover.svg"


def test_show_our_own_symbol(capsys, tmp_path):
    resnet(50).save(str(tmp_path / "ours.json"))
    assert main(["show", "--symbol", str(tmp_path / "ours.json")]) == 0
    output = capsys.readouterr().out
    assert re.search(r"bn_add_relu\W+16 \W+176 -> 144 .*\n.* bn_relu\W+33 \W+144 -> 111", output)
    assert "15.49 GB (37%) saved" in output  # batch 256, 224 pixels, fp16; test_bytes_that_fusion_saves checks the sum
    assert not list(tmp_path.glob("*.svg"))


def test_passes_that_save_nothing_are_not_said_to(capsys):
    """The layout changes, and there is nothing to fuse."""
    main(["show", "--model", "vgg11"])
    output = " ".join(capsys.readouterr().out.split())
    assert re.search(r"forward: [\d.]+ -> [\d.]+ GB, 0.0\d GB \(0%\) more", output) and "saves at least" not in output


def test_an_operator_without_a_shape_rule_is_drawn_without_shapes(capsys, tmp_path):
    x = mx.sym.Convolution(mx.sym.var("data"), kernel=(1, 1), num_filter=4, name="conv")
    mx.sym.smooth_l1(x, name="unknown").save(str(tmp_path / "net.json"))
    assert main(["show", "--symbol", str(tmp_path / "net.json"), "--output", str(tmp_path)]) == 0
    assert "Bytes and shapes are left out: operator smooth_l1 of node" in capsys.readouterr().out
    assert (tmp_path / "after.svg").exists()


@pytest.mark.long
def test_show_what_a_gpu_chose(capsys, monkeypatch, tmp_path):
    """The step is built for the network after its passes, and all its candidates are listed."""
    asked = []

    def build(graph, shapes, options, device_id):
        passes.gradient(graph, shapes)  # it is a network that can be trained, on NHWC images
        asked.append((graph.operators()["BatchNorm"], shapes["data"], options.dtype, device_id))
        choices = [Choice("conv1", "a [bold] kernel", 0.25, (("another", 0.5),))]
        return SimpleNamespace(choices=choices, price=repeatable)

    monkeypatch.setattr(training_step, "TrainingStep", build)
    resnet(50).save(str(tmp_path / "ours.json"))
    for source in (["--symbol", str(tmp_path / "ours.json")], ["--model", "resnet50_v1"]):
        options = ["--batch-size", "7", "--image-size", "96", "--dtype", "bfloat16", "--gpu", "3"]
        assert main(["show", *source, *options]) == 0
        assert asked.pop() == (53, (7, 96, 96, 4), "bfloat16", 3)
        assert re.search(r"GPU 3.*\na \[bold\] kernel +0.2500 ms  conv1\n +or another +0.5000 ms",
                         capsys.readouterr().out)
    assert main(["show", *source, *options, "--step", "--output", str(tmp_path)]) == 0
    chosen = Graph.load(tmp_path / "after.json").operators()
    assert chosen["BatchNormStatistics"] == 52 and "ConvolutionStatistics" not in chosen, "the step as that GPU runs it"


def test_the_step_by_saved_times(capsys, tmp_path):
    """Kernels are shown with their times and those of their rivals, if the repository has times for this step."""
    resnet(50).save(str(tmp_path / "ours.json"))
    assert main(["show", "--symbol", str(tmp_path / "ours.json"), "--step", "--output", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "Chosen by saved times of NVIDIA H100, each candidate by itself" in output
    assert re.search(r"NormConv1x1Pair +0.4933 ms  stage1_block1_bn3_add_relu\n", output)
    assert re.search(r"Conv1x1Statistics +0.0590 ms .* and 5 more\n( .*\n)* +or ConvolutionStatistics +0.0670 ms",
                     output)
    operators = Graph.load(tmp_path / "after.json").operators()
    taken = [operators[name] for name in ("NormConv3x3", "DgradReduce", "DgradStream", "NormDgrad")]
    assert taken == [3, 11, 1, 6]
    assert main(["show", "--symbol", str(tmp_path / "ours.json"), "--step", "--batch-size", "2"]) == 0
    assert "No saved times suffice for this step" in capsys.readouterr().out


@pytest.mark.parametrize("source", [["--model", "resnet18_v1"], ["--symbol"]])
def test_show_the_training_step(source, capsys, tmp_path):
    """Forward and backward in one, after each pass of the pipeline; the drawing has a box for each operator."""
    if source == ["--symbol"]:
        resnet(18).save(str(tmp_path / "ours.json"))
        source = ["--symbol", str(tmp_path / "ours.json")]
    assert main(["show", *source, "--step", "--batch-size", "8", "--output", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    listed = pipeline.training_passes({}, "float16", fewest)
    assert re.findall(r"│ (\w+) +│ +[\w (]+\)? │ +\d+ -> \d+ │", output) == ["layout", *listed]
    assert re.search(r"Read and written in a training step: [\d.]+ -> [\d.]+ GB, .* saved", output)
    step = Graph.load(tmp_path / "after.json")
    assert passes.output_names(step).keys() >= {"loss", "top1"}
    assert {"StemFprop", "StemWgrad", "BatchNormPairApply", "ConvolutionStatistics"} <= step.operators().keys()
    drawings = sorted(tmp_path.glob("[0-9]*.svg"))
    assert [path.stem[3:] for path in drawings] == ["layout", *listed]
    assert sorted(text for text, _, _ in boxes(drawings[-1].read_text())) == sorted(
        f"{node.op} {node.name}" for node in step if not node.is_variable)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a command first: show"),
        (["show"], "give either --symbol FILE or --model NAME"),
        (["show", "--model", "resnet50"], "model zoo has no 'resnet50'; did you mean resnet50_v"),
        (["show", "--symbol", "missing.json"], "cannot read the graph file missing.json"),
        (["show", "--model", "resnet18_v1", "--batch-size", "0"], "both must be at least 1"),
        (["show", "--model", "resnet18_v1", "--dtype", "int8"], "--dtype int8 is not one of float16, bfloat16"),
        (["show", "--model", "resnet18_v1", "--output", "/dev/null/x"],
         "cannot write /dev/null/x/before.svg (Not a directory): give another --output"),
        (["show", "--model", "resnet18_v1", "--gpu", "0", "--inference"], "leave out --inference"),
        (["show", "--model", "resnet18_v1", "--step", "--inference"], "--step shows a training step: leave out --inf"),
        (["show", "--model", "resnet18_v1", "--gpu", "99"], "GPU"),  # no GPU at all, or fewer
    ],
)
def test_mistakes_get_one_sentence(arguments, message, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert message in error


def test_show_the_step_of_a_network_that_drops(capsys, tmp_path):
    dropping = passes.dropout(passes.stochastic_depth(Graph.from_json(resnet(18).tojson()), 0.1), 0.1)
    (tmp_path / "drops.json").write_text(dropping.to_json())
    assert main(["show", "--symbol", str(tmp_path / "drops.json"), "--step", "--batch-size", "2"]) == 0
    output = capsys.readouterr().out
    assert re.search(r"draw_masks\W+9 .*\n.*bn_add_relu\W+8 ", output) and "left out" not in output
    assert re.search(r"DropoutElements\W+2\W.*\n.*DropoutFactors\W+1\W", output) and "DropoutImages" not in output
