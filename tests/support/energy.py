"""A recorded tree of /sys/class whose energy counters a test moves."""

import contextlib
import threading

from worker_node.devices.energy import REGISTERS

LUNAR_LAKE = 0x03072005
COUNTS_PER_JOULE = 16384


class Sysfs:
    """The telemetry of a Lunar Lake's NPU, and the counter of a package."""

    def __init__(self, root):
        self.root = root
        region, zone = root / "intel_pmt" / "telem1", root / "powercap" / "intel-rapl:0"
        for directory, files in (
            (region, {"guid": f"{LUNAR_LAKE:#x}\n"}),
            (zone, {"name": "package-0\n", "max_energy_range_uj": "262143328850\n", "energy_uj": "7000000\n"}),
        ):
            directory.mkdir(parents=True)
            for name, text in files.items():
                (directory / name).write_text(text)
        self.package, self._telemetry = zone / "energy_uj", region / "telem"
        self._offset = REGISTERS[LUNAR_LAKE].offset
        self._telemetry.write_bytes(b"\xee" * 3352)
        # The counter begins again at 0 within the first answer.
        self._count = 2**32 - COUNTS_PER_JOULE
        self.use_npu(0)

    def use_npu(self, counts):
        self._count = (self._count + counts) % 2**32
        with self._telemetry.open("r+b") as file:
            file.seek(self._offset)
            file.write(self._count.to_bytes(4, "little"))

    @contextlib.contextmanager
    def working(self):
        """Both counters move all the time, by 10 mW and by 1 W."""
        ended = threading.Event()

        def move():
            while not ended.wait(0.001):
                self.use_npu(1)
                # At once: a reader never sees half of a number.
                part = self.package.with_suffix(".part")
                part.write_text(f"{int(self.package.read_text()) + 1000}\n")
                part.replace(self.package)

        mover = threading.Thread(target=move)
        mover.start()
        try:
            yield
        finally:
            ended.set()
            mover.join()
