"""Another package adds a recipe, a verb and an exporter by entry points; a broken one is named and hides no other."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollouts.base.plugins import plugins
from rollouts.commands import main
from rollouts.errors import ConfigError
from rollouts.integrations.exports import EXPORTERS, exporter_of, exporters
from rollouts.recipe.files import absolute, built_in, file_of, load_recipe, recipe_names
from rollouts.runs.reader import load_run
from tests.stored_runs import store_long_run

MODULE = """
import json

from rollouts.commands.arguments import add_verb
from rollouts.integrations.exports import Exporter


def add(verbs):
    parser = add_verb(verbs, "greet", greet, "say hello", "greet Ada")
    parser.add_argument("name")


def greet(args):
    print("hello", args.name)
    return 0


def forgets(verbs):
    pass


def raises(verbs):
    raise KeyError("plum")


def write(samples, path):
    path.write_text(json.dumps([sample.index for sample in samples]))


indices = Exporter("vendor_plugin:write", ".json", "the indices of a batch")
"""
RECIPE = '''
"""A recipe of another package."""

from rollouts.recipe import Recipe


def recipe(endpoint, *, batch_size: int = 3) -> Recipe:
    """Nothing that runs."""
    raise NotImplementedError
'''
POINTS = """
[rollouts.recipes]
vendor = vendor_recipe
function = vendor_recipe:recipe
calculator = vendor_recipe
gone = vendor_is_gone

[rollouts.commands]
greet = vendor_plugin:add
forgets = vendor_plugin:forgets
raises = vendor_plugin:raises
missing = vendor_is_gone:add
run = vendor_plugin:raises

[rollouts.exporters]
indices = vendor_plugin:indices
write = vendor_plugin:write
"""


def installed(folder: Path, name: str, points: str) -> None:
    """The metadata of an installed distribution."""
    info = folder / f"{name}-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.0\n")
    (info / "entry_points.txt").write_text(points)


@pytest.fixture
def vendor(tmp_path: Path) -> Iterator[Path]:
    """A folder on ``sys.path`` with the distribution ``vendor``."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "vendor_plugin.py").write_text(MODULE)
    (folder / "vendor_recipe.py").write_text(RECIPE)
    installed(folder, "vendor", POINTS)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    for name in ("vendor_plugin", "vendor_recipe"):
        sys.modules.pop(name, None)


def test_names_are_read_without_an_import(vendor: Path) -> None:
    """Listing recipes and exporters imports no module of the package."""
    assert {"vendor", "gone", "calculator"} <= {*recipe_names()}
    assert exporters() == [*EXPORTERS, "indices", "write"]
    assert "vendor_plugin" not in sys.modules
    assert "vendor_recipe" not in sys.modules


def test_a_recipe_of_a_package_has_a_name(vendor: Path) -> None:
    """It is loaded, has a file, and its name stays a name in what a run stores."""
    assert load_recipe("vendor").__module__ == "vendor_recipe"
    assert file_of("vendor") == vendor / "vendor_recipe.py"
    assert str(absolute("vendor")) == "vendor"


def test_a_built_in_name_is_not_replaced(vendor: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``calculator`` and ``run`` stay those of the package."""
    assert load_recipe("calculator").__module__ == "rollouts.recipes.configs.calculator"
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    assert "RECIPE" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gone", "'gone' of vendor 2.0 cannot be loaded: ModuleNotFoundError"),
        ("function", "'function' of vendor 2.0 cannot be loaded: got .* expected a module"),
        ("unheard", "got 'unheard'; expected .*calculator.*vendor"),
    ],
)
def test_a_recipe_that_cannot_be_loaded_names_its_distribution(vendor: Path, name: str, words: str) -> None:
    """A module that is gone, another value than a module, and an unknown name."""
    with pytest.raises(ConfigError, match=words):
        load_recipe(name)


def test_a_broken_recipe_hides_no_other(vendor: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``rollouts recipes`` lists the others, and prints a line on standard error for the broken one."""
    assert main(["recipes", "--json"]) == 0
    said = capsys.readouterr()
    listed = json.loads(said.out)
    assert listed.keys() == {*built_in(), "vendor"}
    assert listed["vendor"]["options"]["batch_size"]["default"] == 3
    assert "'gone' of vendor 2.0 cannot be loaded" in said.err


def test_a_verb_of_a_package_runs(vendor: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With its options; broken verbs of the same package are not imported."""
    assert main(["greet", "Ada"]) == 0
    assert capsys.readouterr().out == "hello Ada\n"


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        ("missing", "'missing' of vendor 2.0 cannot be loaded: ModuleNotFoundError"),
        ("raises", "'raises' of vendor 2.0 cannot be loaded: add(verbs) raised KeyError"),
        ("forgets", "'forgets' of vendor 2.0 cannot be loaded: expected a function add(verbs)"),
    ],
)
def test_a_verb_that_cannot_be_loaded_is_bad_input(
    vendor: Path, verb: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line with its distribution, and the exit code 2."""
    assert main([verb]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("form", ["dist-info", "egg-info", "egg", "zip", "finder"])
def test_a_distribution_is_found_in_each_form(form: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """As ``importlib.metadata`` finds it: an unpacked or an editable one, an egg, a zip file, or by its own finder."""
    assert "planted" not in plugins("rollouts.commands")
    folder = tmp_path / ("site.egg" if form == "egg" else "site")
    names = {"egg": "EGG-INFO", "egg-info": "vendor.egg-info"}
    info = folder / names.get(form, "vendor-2.0.dist-info")
    info.mkdir(parents=True)
    fields = "Metadata-Version: 2.1\nName: vendor\nVersion: 2.0\n"
    (info / "METADATA").write_text(fields)
    (info / "PKG-INFO").write_text(fields)
    (info / "entry_points.txt").write_text("[rollouts.commands]\nplanted = vendor:add\n")
    if form == "finder":

        class Finder(importlib.metadata.DistributionFinder):
            def find_spec(self, *arguments: object) -> None:
                return None

            def find_distributions(self, context: object = None) -> list[importlib.metadata.Distribution]:
                return [importlib.metadata.PathDistribution(info)]

        request.addfinalizer(functools.partial(sys.meta_path.remove, finder := Finder()))
        sys.meta_path.append(finder)
    else:
        packed = shutil.make_archive(str(tmp_path / "packed"), "zip", folder) if form == "zip" else str(folder)
        request.addfinalizer(functools.partial(sys.path.remove, packed))
        sys.path.insert(0, packed)
    assert plugins("rollouts.commands")["planted"].points[0].value == "vendor:add"


def test_without_plug_ins_the_search_is_not_imported() -> None:
    """``importlib.metadata`` takes longer to import than all that ``rollouts --help`` needs."""
    code = (
        "import sys; known = {*sys.modules}\n"
        "from rollouts.base.plugins import plugins\n"
        "assert plugins('rollouts.unknown') == {}\n"
        "assert 'importlib.metadata' not in {*sys.modules} - known"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_help_lists_verbs_of_packages_without_an_import(vendor: Path) -> None:
    """Broken verbs are in the list, with their distribution."""
    code = (
        f"import sys; sys.path.insert(0, {str(vendor)!r})\n"
        "from rollouts.commands import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'vendor_plugin', 'rollouts.commands.run'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert " ".join(done.stdout.split()).count("of vendor 2.0") == 4


def test_an_exporter_of_a_package_writes_batches(vendor: Path, tmp_path: Path) -> None:
    """``rollouts export --to NAME`` writes a file for each batch."""
    run = tmp_path / "run"
    store_long_run(run, 1)
    assert main(["export", str(run), "--to", "indices", str(tmp_path / "out")]) == 0
    (file,) = (tmp_path / "out").iterdir()
    assert json.loads(file.read_text()) == [sample.index for sample in load_run(run)]


def test_another_value_than_an_exporter_is_refused(vendor: Path) -> None:
    """The error names the distribution and what was expected."""
    with pytest.raises(ConfigError, match=r"'write' of vendor 2.0 cannot be loaded: got .* expected an Exporter"):
        exporter_of("write")


def test_two_distributions_with_one_name_are_refused(vendor: Path) -> None:
    """Neither of them is taken by chance; the error names both."""
    installed(vendor, "rival", "[rollouts.recipes]\nvendor = vendor_recipe\n")
    with pytest.raises(ConfigError, match=r"vendor 2.0 and rival 2.0|rival 2.0 and vendor 2.0"):
        plugins("rollouts.recipes")["vendor"].load()
