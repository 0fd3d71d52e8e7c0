"""The cost model of the original PipeDream (SOSP 2019), so that plans can be compared like with like.

With t the compute of a stage, w its parameter bytes, m its replicas, a(c) the bytes that cross a cut c
and B the bandwidth::

    stage     (t + 4 (m-1) w / (B m)) / m
    its cuts  2 a(c) / (B m)                the one before and the one after it; of the first stage neither
    pipeline  the largest of all

On a cluster of several levels an outer level treats what the inner level achieves for a range of layers
on one server as t, and divides the second term by the devices of a server: its replicas are whole
copies of an inner pipeline. Memory, the optimizer and sharing of links are not in this model.
"""
