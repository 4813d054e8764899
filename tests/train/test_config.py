"""Configuration: presets, the command line, and the messages for mistakes."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re

import pytest

from common.command_line import given_value, option_name, part_of
from common.errors import UserError
from graph_passes import optimizers
from graph_passes.executors.cuda.statistics_group import MAX_MEMBERS
from pipelines import ImageTransform, transform
from train import TrainError, models
from train.command_line import read
from train.config import Config, check, configure
from train.options import data, network, optimizer, run
from train.options.commands import BenchmarkOptions, CompareOptions, Measurement, PredictOptions, ValidateOptions
from train.options.run import DEFAULT_PRESET, MAX_BN_GROUP
from train.presets import load_preset, presets


def config_of(*arguments):
    """The configuration that the command `train` builds from a command line, without looking at the machine."""
    values = read(Config, arguments, command="train")
    return configure(values, load_preset(values.get("config", DEFAULT_PRESET)))


@pytest.mark.parametrize("name", presets())
def test_presets_are_sound_and_say_what_to_expect(name):
    config = load_preset(name)
    assert config.config == name
    check(config)
    text = importlib.import_module(f"train.configs.{name}").__doc__
    assert f"--config {name}" in text
    for word in ("Hardware:", "Images/sec:", "Accuracy:"):
        assert word in text, f"the docstring does not state {word}"


def test_command_line_overrides_the_preset():
    config = config_of("--config", "resnet50_90ep", "--model", "resnet18", "--label-smoothing", "0.2", "--random-area",
                       "0.5", "0.75", "--nesterov")
    preset = load_preset("resnet50_90ep")
    assert config == dataclasses.replace(preset, model="resnet18", label_smoothing=0.2, random_area=(0.5, 0.75),
                                         nesterov=True)


def test_what_a_command_gives_to_whom():
    values = read(BenchmarkOptions, ["--batch_size=7", "--min-steps", "3"], command="benchmark")
    assert configure(values, load_preset("resnet50_90ep")).batch_size == 7
    assert part_of(Measurement, values) == Measurement(min_steps=3)


def test_commands_have_the_options_that_they_use():
    """All are options of training, declared once, except the command's own."""
    names = {kind: {field.name for field in dataclasses.fields(kind)}
             for kind in (Config, ValidateOptions, BenchmarkOptions, CompareOptions)}
    assert names[ValidateOptions] - names[Config] == {"checkpoint", "report", "int8", "output_", "profile_start"}
    assert names[BenchmarkOptions] - names[Config] == {field.name for field in dataclasses.fields(Measurement)}
    assert names[Config] - names[CompareOptions] == {"resume", "weights"}
    for kind in (ValidateOptions, BenchmarkOptions):
        assert not names[kind] & {"epochs", "schedule", "resume", "weights", "checkpoint_minutes", "commit_every"}
    assert not names[ValidateOptions] & {"learning_rate", "model", "seed", "mixup", "buckets", "cache", "output"}


def test_groups_of_batchnorm_are_as_large_as_their_kernels_allow():
    assert MAX_BN_GROUP == MAX_MEMBERS


def test_json_round_trip():
    config = Config(model="resnet34", decay_epochs=(1.0, 2.5), random_area=(0.3, 0.7), mlperf=True)
    assert Config.from_dict(config.to_dict()) == config
    with pytest.raises(TrainError, match="^its run had the option --new-knob, which this version"):
        Config.from_dict({"model": "resnet18", "new_knob": 1})


def test_what_earlier_versions_wrote_is_read():
    """Earlier versions: a network had a depth, there were two ways to average gradients, and one loss."""
    before = {name: value for name, value in Config().to_dict().items()
              if name not in ("loss", "bce_threshold", "class_weights", "cutmix", "cutmix_share")}
    assert Config.from_dict(before) == Config() and Config().loss == "softmax"
    assert Config.from_dict({"depth": 18, "all_reduce": "peer", "epochs": 3}) == Config(model="resnet18", epochs=3)


MISTAKES = {
    "--modle resnet50": "there is no option --modle; did you mean --model?",
    "--depth 34": "--depth has been replaced by --model: give --model resnet34",
    "--zzzzz": "there is no option --zzzzz (see python -m train train --help)",
    "--config cpu_smaple": "there is no preset 'cpu_smaple' in train/configs/; did you mean cpu_sample?",
    "--model resnet51": "there is no model 'resnet51'; did you mean resnet50?",
    "--model ?": f"there is no model '?'; there are: {', '.join(sorted(models.names()))}",
    "--schedule cosin": "there is no schedule 'cosin'; did you mean cosine?",
    "--executor mxet": "--executor mxet is not one of auto, mxnet, reference, cuda (see",
    "--device tpu": "--device tpu is not one of auto, cpu, gpu",
    "--learning-rate fast": "--learning-rate needs a number, not 'fast'",
    "--epochs 0.5": "--epochs needs a whole number, not '0.5'",
    "--batch-size": "--batch-size needs a value (see",
    "--batch-size 0": "--batch-size 0 must be at least 1",
    "--batch-size -3": "--batch-size -3 must be at least 1",
    "--image-size 0": "--image-size 0 must be from 32 to 8192",
    "--epochs 0": "--epochs 0 must be from 1 to 100000",
    "--bn-group 0": "--bn-group 0 must be from 1 to 16",
    "--bn-group 17": "--bn-group 17 must be from 1 to 16",
    "--accumulate 0": "--accumulate 0 must be at least 1",
    "--learning-rate 0": "--learning-rate 0.0 must be from 1e-09 to 1000",
    "--clip-norm -1": "--clip-norm -1.0 must be 0, or at least 1e-06",
    "--weight-decay 1e20": "--weight-decay 1e+20 must be from 0 to 100",
    "--learning-rate nan": "--learning-rate nan must be from 1e-09 to 1000",
    "--learning-rate 1e-30": "--learning-rate 1e-30 must be from 1e-09 to 1000",
    "--learning-rate 1e30": "--learning-rate 1e+30 must be from 1e-09 to 1000",
    "--clip-norm 1e-30": "--clip-norm 1e-30 must be 0, or at least 1e-06",
    "--clip-norm inf": "--clip-norm inf must be a finite number",
    "--backbone-lr-factor 1e9": "--backbone-lr-factor 1000000000.0 must be from 1e-06 to 1000",
    "--mean 1e9 0 0": "--mean 1000000000.0 0.0 0.0 must be three numbers from 0 to 255",
    "--mean 0 nan 0": "--mean 0.0 nan 0.0 must be three numbers from 0 to 255",
    "--std 1e-30 1 1": "--std 1e-30 1.0 1.0 must be three numbers from 0.1 to 1000",
    "--val-crop-fraction 0.01": "--val-crop-fraction 0.01 must be from 0.1 to 1",
    "--schedule step --decay-factor 2": "--decay-factor 2.0 must be above 0 and at most 1",
    "--num-classes 99999999999999999999": "--num-classes 99999999999999999999 must be from 0 to 1000000",
    "--val-image-size 20000": "--val-image-size 20000 must be 0, or from 32 to 8192",
    "--epochs 99999999999999999999": "--epochs 99999999999999999999 must be from 1 to 100000",
    "--num-threads 100000": "--num-threads 100000 must be from 0 to 1024",
    "--momentum 1": "--momentum 1.0 must be at least 0 and below 1",
    "--stochastic-depth 1": "--stochastic-depth 1.0 must be at least 0 and below 1",
    "--stochastic-depth -0.1": "--stochastic-depth -0.1 must be at least 0 and below 1",
    "--stochastic-depth-mode block":
        "--stochastic-depth-mode block has no effect without --stochastic-depth: leave it out, or give",
    "--dropout 1": "--dropout 1.0 must be at least 0 and below 1",
    "--random-area 0.5 0.1": "--random-area 0.5 0.1 must be two fractions from 0.001 on, the smaller first",
    "--random-area 0.00001 0.00001": "--random-area 1e-05 1e-05 must be two fractions from 0.001 on",
    "--random-ratio 0.75 1e6": "--random-ratio 0.75 1000000.0 must be two numbers from 0.01 to 100",
    "--crop-padding 4 --random-area 0.5 1":
        "--random-area 0.5 1.0 is for crops of a random area, and --crop-padding 4 takes crops of a fixed size: leave",
    "--config cifar10_resnet18 --random-ratio 1 1": "--random-ratio 1.0 1.0 is for crops of a random area, and --crop-",
    "--randaugment-magnitude 5":
        "--randaugment-magnitude is for --auto-augment randaugment or randaugment-timm, and this run has none: leave",
    "--auto-augment randaugment --randaugment-magnitude-std 0.5":
        "--randaugment-magnitude-std is for --auto-augment randaugment-timm, and this run has randaugment: leave",
    "--repeated-augmentation 1": "--repeated-augmentation 1 must be 0, or at least 2",
    "--repeated-augmentation -3": "--repeated-augmentation -3 must be 0, or at least 2",
    "--cache -2": "--cache -2.0 must be 0 or more, or -1",
    "--target-accuracy 76": "--target-accuracy 76.0 must be a fraction from 0 to 1",
    "--schedule step --decay-epochs 3 2": "--decay-epochs 3.0 2.0 must rise",
    "--epochs 3 --schedule step":
        "--decay-epochs 30.0 60.0 80.0 is beyond the run of 3 epochs, whose learning rate would never fall; "
        "lower --decay-epochs",
    "--epochs 3 --schedule step --decay-epochs 3": "--decay-epochs 3.0 is beyond the run of 3 epochs",
    "--image-size 64 --first-image-size 32 --epochs 3 --resize-epochs 3 4":
        "--resize-epochs 3.0 4.0 is beyond the run of 3 epochs, whose images would all have the 32 pixels of --first",
    "--epochs 2 --warmup-epochs 3": "--warmup-epochs 3 is longer than the run of 2 epochs",
    "--learning-rate 0.01 --final-learning-rate 0.1":
        "--final-learning-rate 0.1 is above --learning-rate 0.01, from which the learning rate is to fall; "
        "lower --final-learning-rate",
    "--first-image-size 96 --image-size 64": "--first-image-size 96 is larger than --image-size 64, to which",
    "--first-image-size 16": "--first-image-size 16 must be 0, or from 32 to 8192",
    "--resize-epochs 3 5": "--resize-epochs is given without --first-image-size",
    "--first-image-size 64 --resize-epochs 5 3": "--resize-epochs 5.0 3.0 must be two numbers of epochs from 0 on",
    "--decay-epochs 3 5": "--decay-epochs is for --schedule step, and this run has cosine",
    "--schedule step --decay-epochs 3 --decay-power 2": "--decay-power is for --schedule polynomial, and this",
    "--trust-coefficient 0.1 --optimizer sgd": "--trust-coefficient is for --optimizer lars, and this run has sgd",
    "--optimizer adam": "there is no optimizer 'adam'; did you mean adamw?",
    "--optimizer ?": f"there is no optimizer '?'; there are: {', '.join(optimizers.names())}",
    "--optimizer adamw --nesterov": "--nesterov is for --optimizer lars or sgd, and this run has adamw: leave it out",
    "--optimizer sgd --betas 0.9 0.99":
        "--betas is for --optimizer adamw or lamb or lion, and this run has sgd: leave it out",
    "--optimizer lamb --betas 0.9 1": "--betas 0.9 1.0 must be two fractions below 1",
    "--optimizer lamb --epsilon 0": "--epsilon 0.0 must be above 0 and at most 1",
    "--random-area 0.5": "--random-area needs 2 values (see",
    "--cutmix -1": "--cutmix -1.0 must be from 0 to 100",
    "--mixup 1e308": "--mixup 1e+308 must be from 0 to 100",
    "--mixup 0.2 --cutmix 1 --cutmix-share 2": "--cutmix-share 2.0 must be a fraction from 0 to 1",
    "--cutmix-share 0.5": "--cutmix-share 0.5 is for runs with both mixup and CutMix: leave it out, or give --mixup",
    "--bce-threshold 0.2": "--bce-threshold is for --loss bce, and this run has softmax: leave it out, or give --loss",
    "--loss bce --bce-threshold 1": "--bce-threshold 1.0 must be at least 0 and below 1",
    "--loss bce --bce-threshold 0.95 --label-smoothing 0.1":
        "--bce-threshold 0.95 is not below 0.9, the largest target with --label-smoothing 0.1: no target would become",
    "--loss bc": "there is no loss 'bc'; did you mean bce?",
    "--auto-augment augmix": "--auto-augment augmix is not one of none, trivialaugment, randaugment, randaugment-timm,",
    "--randaugment-operations 3": "--randaugment-operations is for --auto-augment randaugment or randaugment-timm, and",
    "--auto-augment randaugment --randaugment-operations 5": "--randaugment-operations 5 must be from 1 to 4",
    "--auto-augment randaugment --randaugment-magnitude 31": "--randaugment-magnitude 31.0 must be from 0 to 30",
    "--auto-augment randaugment --randaugment-magnitude-std 1":
        "--randaugment-magnitude-std is for --auto-augment randaugment-timm, and this run has randaugment",
    "--auto-augment randaugment-timm --randaugment-magnitude 11":
        "--randaugment-magnitude 11 is too large for --auto-augment randaugment-timm",
    "--hue 0.6": "--hue 0.6 must be from 0 to 0.5, half of the colour circle",
    "--random-erasing 2": "--random-erasing 2.0 must be a probability from 0 to 1",
    "--train-interpolation nearest": "--train-interpolation nearest is not one of same, bilinear, bicubic, random",
    "--class-weights 1.5": "--class-weights 1.5 must be a fraction from 0 to 1",
    "--class-weights 1 --loss bce": "--class-weights is for --loss softmax, and this run has bce: leave it out",
    "--class-weights 0.5 --balance 1": "--balance 1 and --class-weights 0.5 would both raise the weight of rare",
    "--cutmix 1 --cutmix-share 0.5": "--cutmix-share 0.5 is for runs with both mixup and CutMix: leave it out, or give "
                                     "--mixup",
    "--patience 3 --validate-every 0": "--patience 3 needs the accuracy in validation, and --validate-every 0 has none",
    "--target-accuracy 0.9 --validate-every 0": "--target-accuracy 0.9 needs the accuracy in validation, and",
    "--data=": "--data is followed by an empty value: give one, or leave it out",
    "--lr 0.1": "there is no option --lr; did you mean --learning-rate?",
    "--config": "--config needs a value",
    "--config --epochs 3": "--config needs a value",
    "stray": "stray belongs to no option (see",
    "-x": "there is no option -x (see",
}


@pytest.mark.parametrize("arguments", MISTAKES)
def test_mistakes_get_one_sentence(arguments):
    with pytest.raises(UserError) as error:
        config_of(*arguments.split())
    sentence = str(error.value)
    assert sentence.startswith(MISTAKES[arguments])
    assert "\n" not in sentence


@pytest.mark.parametrize("arguments, warmup", [
    ("--epochs 2", 0.4),  # a fifth
    ("--epochs 60", 5),  # the preset's
    ("--epochs 200", 5),
    ("--epochs 2 --warmup-epochs 1.5", 1.5),
    ("--epochs=2 --warmup_epochs=0", 0),
])
def test_warmup_of_a_shortened_run(arguments, warmup):
    config = config_of("--config", "resnet50_90ep", *arguments.split())
    assert config.warmup_epochs == pytest.approx(warmup)


def test_another_optimizer_than_the_preset_s_brings_its_own_recipe():
    """An optimizer that needs another learning rate replaces the preset's recipe. Values on the command line apply in
    any case."""
    preset = load_preset("resnet50_90ep")

    def constants(*arguments, default=preset):
        config = configure(read(Config, arguments, command="train"), default)
        return config.learning_rate, config.weight_decay, config.epsilon

    assert constants("--optimizer", "lars") == (preset.learning_rate, preset.weight_decay, 1e-8)
    assert constants("--optimizer", "adamw") == (2.5e-4, 0.05, 1e-8)
    assert constants("--optimizer", "lamb", "--learning-rate", "0.5") == (0.5, 0.02, 1e-6)
    assert constants("--optimizer", "lion") == (2.5e-5, 0.5, 1e-8)
    assert configure({"optimizer": "lion"}, preset).betas == (0.9, 0.99)
    assert constants("--optimizer", "rmsprop") == (0.016, 1e-5, 1e-3)
    assert configure({"optimizer": "rmsprop"}, preset).momentum == 0.9
    resumed = dataclasses.replace(preset, optimizer="lamb", learning_rate=0.125)
    assert constants("--optimizer", "lamb", default=resumed) == (0.125, preset.weight_decay, 1e-8)


def test_a_preset_s_policy_can_be_left_out():
    """The options that belong to it stay, and have no effect."""
    config = config_of("--config", "resnet50_a1_600ep", "--auto-augment", "none", "--loss", "softmax")
    config.transform.check()
    assert config.randaugment_magnitude == 7 and config.bce_threshold == 0.2
    by_block = dataclasses.replace(config, stochastic_depth_mode="block")
    assert configure({"stochastic_depth": 0.0}, by_block).stochastic_depth_mode == "block"


def test_one_decay_within_the_run_is_enough():
    assert config_of("--schedule", "step", "--epochs", "31").schedule == "step"
    constant = Config(schedule="step", epochs=3, warmup_epochs=0.0)  # of an earlier version
    assert configure({"val_crop_fraction": 1.0}, constant).decay_epochs == constant.decay_epochs


def test_an_empty_shell_variable_is_no_value():
    with pytest.raises(UserError, match="^--resume is followed by an empty value"):
        config_of("--epochs", "2", "--resume", "")
    with pytest.raises(UserError, match="^python -m train predict is followed by an empty value"):
        read(PredictOptions, ["", "--checkpoint", "run"], command="predict")


def test_an_underscore_in_an_option_is_a_hyphen():
    assert config_of("--batch_size", "12").batch_size == 12
    assert given_value(["--warmup_epochs=3"], "--warmup-epochs") == "3"


def test_of_two_presets_the_last_one_is_taken():
    config = config_of("--config", "cpu_sample", "--config=overfit_100")
    assert config == load_preset("overfit_100")


def test_list_of_presets(capsys):
    with pytest.raises(SystemExit) as end:
        read(BenchmarkOptions, ["--config", "?"], command="benchmark")
    assert not end.value.code
    lines = capsys.readouterr().out.splitlines()
    assert lines[::2] == presets() and all(re.match("    [A-Z][A-Za-z]*", line) for line in lines[1::2])


def test_help_of_validation_tells_no_defaults(capsys):
    """The defaults come from the run."""
    with pytest.raises(SystemExit):
        read(ValidateOptions, ["--help"], command="validate")
    text = capsys.readouterr().out
    assert "--val-image-size" in text and "default:" not in text


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit) as end:
        read(Config, ["--help"], command="train")
    assert end.value.code == 0
    text = capsys.readouterr().out
    titles = []
    for field in dataclasses.fields(Config):
        (kind,) = (base for base in Config.__mro__ if field.name in inspect.get_annotations(base))
        titles.append(kind.__doc__.removesuffix("."))
        _, _, group = text.partition(f"\n{titles[-1]}:\n")
        assert f"\n  {option_name(field.name)}" in "\n" + group.partition("\n\n")[0]
    assert list(dict.fromkeys(titles)) == [line[:-1] for line in text.splitlines()[4:] if line[:1].isupper()]


def test_help_breaks_no_line_where_the_source_does(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit):
        read(BenchmarkOptions, ["-h"], command="benchmark")
    text = capsys.readouterr().out
    assert "then crop to the stored size" in text  # two lines of pipelines/transform.py
    assert "speed for this GPU, data and number of threads" in text


@pytest.mark.parametrize("subject", [data, network, optimizer, run])
def test_limits_stand_beside_their_options(subject):
    declared = {field.name for kind in vars(subject).values() if dataclasses.is_dataclass(kind)
                for field in dataclasses.fields(kind)}
    assert subject.LIMITS.keys() <= declared


def test_every_option_of_images_reaches_the_loader_and_has_a_limit():
    values = {"random_area": (0.25, 0.5), "random_ratio": (0.5, 2.0), "crop_padding": 3, "mirror": False, "cutout": 0.5,
              "val_crop_fraction": 0.75, "mean": (1.0, 2.0, 3.0), "std": (4.0, 5.0, 6.0), "interpolation": "bicubic"}
    assert Config(**values).transform == ImageTransform(**values)
    numbers = {name for name, value in vars(ImageTransform()).items()
               if value != () and not isinstance(value, (bool, str))}
    assert numbers == transform.LIMITS.keys()
