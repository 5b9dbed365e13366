"""What a step of a group of devices does beside its rows: meet, place experts, report loads."""

from collections.abc import Callable

from deepmesh.wire.messages import SubmitStep
from services.executor.eplb import GroupExperts
from services.executor.gpu.flight import LoadsBuffer
from services.executor.gpu.group import DeviceGroup
from services.executor.gpu.model import DeviceModel


class DeviceGroupSteps:
    """See `GroupSteps`: called by the thread that launches, but for what settles."""

    def __init__(self, group: DeviceGroup, model: DeviceModel, experts: GroupExperts) -> None:
        assert model.group is not None, "the model has all experts"
        self._group, self._experts, self._counted = group, experts, model.group

    @property
    def loads_shape(self) -> tuple[int, int]:
        """Layers and experts."""
        layers, experts = self._counted.counts.shape
        return layers, experts

    def enter(self, step: SubmitStep) -> None:
        """See `GroupSteps`."""
        self._experts.before(step)
        self._group.enter(step)

    def leave(self, step: SubmitStep, room: LoadsBuffer) -> Callable[[], tuple[bytes, bytes]]:
        """See `GroupSteps`."""
        settle = self._counted.report(room, with_loads=self._experts.reports(step))

        def checked() -> tuple[bytes, bytes]:
            self._group.check(step.engine_epoch)
            return settle()

        return checked
