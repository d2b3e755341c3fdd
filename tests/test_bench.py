"""bench.py: it runs, and its table has a row for every case; no time is asserted."""

import bench

TINY = "--set dim=32 n_layers=2 n_heads=4 n_kv_heads=2 ffn_dim=48 vocab_size=67 --seq-len 32"


def test_the_table_has_a_row_for_every_case(monkeypatch, capsys):
    monkeypatch.setitem(bench.SIZES, "debug", (TINY, 4))
    argv = "bench.py --steps 1 --cases".split()
    monkeypatch.setattr("sys.argv", [*argv, "one process", "dp 2", "pp 2"])
    bench.main()
    out = capsys.readouterr().out
    table = [line.split(" | ") for line in out.splitlines() if line.startswith("| ")]
    assert [row[0] for row in table[2:]] == ["| one process", "| dp 2", "| pp 2"]
    assert {len(row) for row in table[2:]} == {5}
    assert all(float(cell) > 0 for row in table[2:] for cell in row[2:4])
    for part in ("import", "group", "build", "start", "first step", "--help"):
        assert part in out


def test_a_profile_names_the_operators_of_a_step():
    assert "aten::mm" in bench.run_ranks(1, bench.profile, TINY, 2)[0]
