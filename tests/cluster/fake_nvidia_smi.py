"""nvidia-smi's listings of the fake GPUs: fake_mig.py says what is real and what is not."""

from __future__ import annotations

from collections.abc import Sequence

from fake_mig_gpus import Node, StrangeCallError, bus_id, options_of


def smi(node: Node, argv: Sequence[str]) -> None:
    plain = {
        ("-L",): list_gpus, ("--list-gpus",): list_gpus, ("mig", "-lgi"): list_instances,
        ("mig", "--list-gpu-instances"): list_instances, ("mig", "-lci"): list_compute_instances,
        ("mig", "-lgip"): list_profiles, ("mig", "-lgipp"): list_placements, ("-q", "-x"): query_xml,
    }  # fmt: skip
    if shown := plain.get(tuple(argv)):
        shown(node)
        return
    words = {"--format": "format", "--query-gpu": "gpu", "--query-compute-apps": "apps", "-i": "gpus", "--id": "gpus"}
    options = options_of(argv, words)
    style = options.get("format", "").split(",")
    if "csv" not in style or set(style) - {"csv", "noheader", "nounits"} or ("gpu" in options) == ("apps" in options):
        raise StrangeCallError(f"nvidia-smi {list(argv)}")
    gpus = [int(part) for part in options["gpus"].split(",")] if "gpus" in options else list(range(len(node.gpus)))
    rows = gpu_rows(node, gpus) if "gpu" in options else app_rows(node, gpus)
    print_csv(rows, options.get("gpu") or options["apps"], style, known=GPU_FIELDS if "gpu" in options else APP_FIELDS)


GPU_FIELDS = {
    "index": "", "uuid": "", "gpu_uuid": "", "name": "", "gpu_name": "", "pci.bus_id": "", "driver_version": "",
    "mig.mode.current": "", "mig.mode.pending": "", "memory.total": "MiB", "memory.used": "MiB", "memory.free": "MiB",
}  # fmt: skip
APP_FIELDS = {"pid": "", "gpu_uuid": "", "gpu_name": "", "process_name": "", "used_memory": "MiB",
              "used_gpu_memory": "MiB"}  # fmt: skip


def gpu_rows(node: Node, gpus: Sequence[int]) -> list[dict[str, str]]:
    rows = []
    for gpu in gpus:
        one, name = node.gpus[gpu], node.model.name
        mode = {True: "Enabled", False: "Disabled"}
        rows.append({
            "index": str(gpu), "uuid": one["uuid"], "gpu_uuid": one["uuid"], "name": name, "gpu_name": name,
            "pci.bus_id": bus_id(gpu), "driver_version": "535.161.07", "mig.mode.current": mode[one["mig"]],
            "mig.mode.pending": mode[one["pending"]], "memory.total": str(node.model.total_mib), "memory.used": "4",
            "memory.free": str(node.model.total_mib - 625),
        })  # fmt: skip
    return rows


def app_rows(node: Node, gpus: Sequence[int]) -> list[dict[str, str]]:
    return [
        {
            "pid": str(pid), "gpu_uuid": node.gpus[gpu]["uuid"], "gpu_name": node.model.name, "process_name": "python",
            "used_memory": "1024", "used_gpu_memory": "1024",
        }
        for gpu in gpus
        for pid in node.busy(gpu).values()
    ]  # fmt: skip


def print_csv(rows: list[dict[str, str]], fields: str, style: Sequence[str], known: dict[str, str]) -> None:
    names = [name.strip() for name in fields.split(",")]
    for name in names:
        if name not in known:
            raise StrangeCallError(f'Field "{name}" is not a valid field to query.')
    units = {name: f" {known[name]}" if known[name] else "" for name in names}
    if "noheader" not in style:
        print(", ".join(f"{name} [{known[name]}]" if known[name] else name for name in names))
    for row in rows:
        print(", ".join(row[name] + ("" if "nounits" in style else units[name]) for name in names))


def list_gpus(node: Node) -> None:
    for gpu, one in enumerate(node.gpus):
        print(f"GPU {gpu}: {node.model.name} (UUID: {one['uuid']})")
        for place, instance in enumerate(one["instances"]):
            print(f"  MIG {instance['profile']:<12}Device {place:>2}: (UUID: {instance['uuid']})")


def list_instances(node: Node) -> None:
    if not any(one["mig"] for one in node.gpus):
        print("No MIG-enabled devices found.")
        return
    line = "+-------------------------------------------------------+"
    rows = [(gpu, one) for gpu, state in enumerate(node.gpus) for one in state["instances"]]
    if not rows:
        print("No GPU instances found: Not Found")
        return
    print(f"{line}\n| GPU instances:                                        |")
    print("| GPU   Name             Profile  Instance   Placement  |")
    print(f"|                          ID       ID       Start:Size |\n|{'=' * 55}|")
    for gpu, one in rows:
        row = node.model.profiles[one["profile"]]
        place = f"{one['start']}:{row.size}"
        print(f"|{gpu:>4}  {'MIG ' + one['profile']:<17}{row.profile_id:>4}{one['gi']:>9}{place:>14}     |\n{line}")


def list_compute_instances(node: Node) -> None:
    rows = [(gpu, one) for gpu, state in enumerate(node.gpus) for one in state["instances"]]
    if not rows:
        print("No compute instances found: Not found")
        return
    line = "+--------------------------------------------------------------------+"
    print(f"{line}\n| Compute instances:                                                 |")
    print("| GPU     GPU       Name             Profile   Instance   Placement  |")
    print("|       Instance                       ID        ID       Start:Size |")
    print(f"|         ID                                                         |\n|{'=' * 68}|")
    for gpu, one in rows:
        row = node.model.profiles[one["profile"]]
        name = f"MIG {one['profile']}"
        print(f"|{gpu:>4}{one['gi']:>7}       {name:<17}{row.compute - 1:>4}{0:>10}{'0:' + str(row.compute):>14}     |")
        print(line)


def list_profiles(node: Node) -> None:
    line = "+-----------------------------------------------------------------------------+"
    print(f"{line}\n| GPU instance profiles:                                                      |")
    print("| GPU   Name             ID    Instances   Memory     P2P    SM    DEC   ENC  |")
    print(f"|                              Free/Total   GiB              CE    JPEG  OFA  |\n|{'=' * 77}|")
    for gpu, one in enumerate(node.gpus):
        for row in node.model.profiles.values() if one["mig"] else ():
            free = sum(node.is_legal(gpu, row, at) for at in row.starts)
            counts = f"{min(free, row.most)}/{row.most}"
            print(
                f"|{gpu:>4}  {'MIG ' + row.name:<17}{row.profile_id:>4}{counts:>8}{row.mib / 1024:>12.2f}"
                f"{'No':>8}{row.sms:>7}{0:>6}{0:>6}   |\n{line}"
            )


def list_placements(node: Node) -> None:
    for gpu, one in enumerate(node.gpus):
        for row in node.model.profiles.values() if one["mig"] else ():
            word = "Placements:" if len(row.starts) > 1 else "Placement :"
            starts = ",".join(map(str, sorted(row.starts)))
            print(f"GPU {gpu:>2} Profile ID {row.profile_id:>2} {word} {{{starts}}}:{row.size}")


def query_xml(node: Node) -> None:
    """Only what almanac's Prolog reads."""
    print('<?xml version="1.0" ?>\n<nvidia_smi_log>')
    for gpu, one in enumerate(node.gpus):
        print(f'\t<gpu id="{bus_id(gpu)}">\n\t\t<mig_devices>')
        for place, instance in enumerate(one["instances"]):
            print(
                f"\t\t\t<mig_device>\n\t\t\t\t<index>{place}</index>\n"
                f"\t\t\t\t<gpu_instance_id>{instance['gi']}</gpu_instance_id>\n"
                "\t\t\t\t<compute_instance_id>0</compute_instance_id>\n\t\t\t</mig_device>"
            )
        print(f"\t\t</mig_devices>\n\t\t<uuid>{one['uuid']}</uuid>\n\t</gpu>")
    print("</nvidia_smi_log>")
