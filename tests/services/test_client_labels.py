"""A client's own id is a label: two requests that share one are two requests."""

from deepmesh.wire.messages import Finished, FinishReason
from services.gateway.arrival import arrive
from services.scheduler.sim.requests import SimRequest
from tests.core.driver import TOKENIZER, Driver


def test_aborting_one_of_two_requests_with_the_same_label_leaves_the_other() -> None:
    headers = [(b"x-request-id", b"my-label")]
    first, second = (arrive("/v1/completions", headers) for _ in range(2))
    assert first.request_id == second.request_id == "my-label"
    driver = Driver()
    requests = [
        SimRequest(arrival.rid, [1, 2, 3, 4], 6, seed=seed)
        for seed, arrival in enumerate((first, second))
    ]
    for request in requests:
        driver.requests[request.rid] = request
        driver.mail(request.generate(TOKENIZER))
    driver.step()
    driver.abort(requests[0])
    driver.run()
    ends = [request.terminals[0] for request in requests]
    assert all(isinstance(end, Finished) for end in ends)
    reasons = [end.reason for end in ends if isinstance(end, Finished)]
    assert reasons == [FinishReason.ABORT, FinishReason.LENGTH]
