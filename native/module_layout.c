/* The layout of the shared memory as the compiler made it; see module.h. */
#include "module.h"

static int add_field(PyObject *fields, const char *name, size_t at, size_t size)
{
    PyObject *pair = Py_BuildValue("(nn)", (Py_ssize_t)at, (Py_ssize_t)size);
    int result = pair ? PyDict_SetItemString(fields, name, pair) : -1;
    Py_XDECREF(pair);
    return result;
}

static int add_struct(PyObject *all, const char *name, size_t size, PyObject *fields)
{
    if (!fields)
        return -1;
    PyObject *pair = Py_BuildValue("(nN)", (Py_ssize_t)size, fields);
    int result = pair ? PyDict_SetItemString(all, name, pair) : -1;
    Py_XDECREF(pair);
    return result;
}

#define FIELD(type, field)                                                                \
    if (add_field(fields, #field, offsetof(struct type, field),                           \
                  sizeof(((struct type *)0)->field)) < 0)                                 \
        goto failed;
#define BEGIN(type) fields = PyDict_New(); if (!fields) goto failed;
#define END(type)                                                                         \
    if (add_struct(all, #type, sizeof(struct type), fields) < 0)                          \
        goto failed_all;

/* The layout as the compiler sees it, for the test that compares it with the NumPy dtypes. */
METHOD(layout)
{
    UNUSED;
    (void)args;
    (void)count;
    PyObject *fields = NULL, *all = PyDict_New();
    if (!all)
        return NULL;
    BEGIN(ps_header)
    FIELD(ps_header, magic) FIELD(ps_header, layout_version) FIELD(ps_header, kind)
    FIELD(ps_header, job_id) FIELD(ps_header, bytes) FIELD(ps_header, generation)
    FIELD(ps_header, owner_pid) FIELD(ps_header, index) FIELD(ps_header, owner_start)
    FIELD(ps_header, job_name)
    END(ps_header)
    BEGIN(ps_shard)
    FIELD(ps_shard, heartbeat) FIELD(ps_shard, sequence) FIELD(ps_shard, frames)
    FIELD(ps_shard, parked) FIELD(ps_shard, tid) FIELD(ps_shard, recovered)
    FIELD(ps_shard, cpu) FIELD(ps_shard, mode) FIELD(ps_shard, lease)
    END(ps_shard)
    BEGIN(ps_server)
    FIELD(ps_server, pid) FIELD(ps_server, state) FIELD(ps_server, start) FIELD(ps_server, beat)
    END(ps_server)
    BEGIN(ps_entry)
    FIELD(ps_entry, generation) FIELD(ps_entry, wanted) FIELD(ps_entry, pid) FIELD(ps_entry, gone) FIELD(ps_entry, pid_start)
    FIELD(ps_entry, name) FIELD(ps_entry, served) FIELD(ps_entry, retired) FIELD(ps_entry, grant)
    FIELD(ps_entry, grant_seq) FIELD(ps_entry, member) FIELD(ps_entry, base) FIELD(ps_entry, obsolete)
    FIELD(ps_entry, applied) FIELD(ps_entry, dropped)
    FIELD(ps_entry, refused) FIELD(ps_entry, samples) FIELD(ps_entry, loss)
    FIELD(ps_entry, started) FIELD(ps_entry, finished) FIELD(ps_entry, version)
    FIELD(ps_entry, staleness_sum) FIELD(ps_entry, staleness_max) FIELD(ps_entry, clock)
    FIELD(ps_entry, reason) FIELD(ps_entry, drained) FIELD(ps_entry, unasked) FIELD(ps_entry, handed)
    FIELD(ps_entry, histogram) FIELD(ps_entry, norm)
    FIELD(ps_entry, outstanding) FIELD(ps_entry, items)
    END(ps_entry)
    BEGIN(ps_control)
    FIELD(ps_control, header) FIELD(ps_control, shards) FIELD(ps_control, slots)
    FIELD(ps_control, ahead) FIELD(ps_control, mode) FIELD(ps_control, report)
    FIELD(ps_control, refuse_nonfinite) FIELD(ps_control, staleness_aware)
    FIELD(ps_control, optimizer) FIELD(ps_control, spin_ns) FIELD(ps_control, hyper)
    FIELD(ps_control, phase) FIELD(ps_control, stop) FIELD(ps_control, pause) FIELD(ps_control, temporary) FIELD(ps_control, saves)
    FIELD(ps_control, sync_wanted) FIELD(ps_control, wave) FIELD(ps_control, sync_done)
    FIELD(ps_control, model_ready) FIELD(ps_control, watchdog_pid)
    FIELD(ps_control, watchdog_start) FIELD(ps_control, lease_generation)
    FIELD(ps_control, lease_pid) FIELD(ps_control, lease_state) FIELD(ps_control, lease_start)
    FIELD(ps_control, lease_shards)
    FIELD(ps_control, version) FIELD(ps_control, supersteps_done) FIELD(ps_control, shard_bell)
    FIELD(ps_control, manager_bell) FIELD(ps_control, sleepers) FIELD(ps_control, superstep)
    FIELD(ps_control, work) FIELD(ps_control, batches)
    FIELD(ps_control, epochs) FIELD(ps_control, seed) FIELD(ps_control, next)
    FIELD(ps_control, epochs_done) FIELD(ps_control, requeued)
    FIELD(ps_control, past_applied) FIELD(ps_control, past_dropped)
    FIELD(ps_control, past_refused) FIELD(ps_control, past_samples)
    FIELD(ps_control, requeued_total) FIELD(ps_control, lease)
    FIELD(ps_control, heir)
    FIELD(ps_control, server_deaths) FIELD(ps_control, server_starts)
    FIELD(ps_control, learner_deaths) FIELD(ps_control, watchdog_starts)
    FIELD(ps_control, checkpoints) FIELD(ps_control, checkpoint_version)
    FIELD(ps_control, checkpoint_failures) FIELD(ps_control, started)
    FIELD(ps_control, config) FIELD(ps_control, finished) FIELD(ps_control, server) FIELD(ps_control, shard) FIELD(ps_control, roster)
    FIELD(ps_control, superstep_action) FIELD(ps_control, superstep_reason) FIELD(ps_control, superstep_upto)
    FIELD(ps_control, requeue) FIELD(ps_control, sync_text)
    END(ps_control)
    BEGIN(ps_tensor)
    FIELD(ps_tensor, name) FIELD(ps_tensor, role) FIELD(ps_tensor, dims) FIELD(ps_tensor, shape)
    FIELD(ps_tensor, start) FIELD(ps_tensor, count)
    END(ps_tensor)
    BEGIN(ps_weights)
    FIELD(ps_weights, header) FIELD(ps_weights, tensors) FIELD(ps_weights, table_at)
    FIELD(ps_weights, data_at) FIELD(ps_weights, elements) FIELD(ps_weights, parameters)
    FIELD(ps_weights, values)
    END(ps_weights)
    BEGIN(ps_record)
    FIELD(ps_record, cursor) FIELD(ps_record, ring) FIELD(ps_record, generation)
    FIELD(ps_record, sequence) FIELD(ps_record, step) FIELD(ps_record, rate) FIELD(ps_record, version) FIELD(ps_record, applies)
    FIELD(ps_record, steps) FIELD(ps_record, supersteps) FIELD(ps_record, booked)
    END(ps_record)
    BEGIN(ps_journal)
    FIELD(ps_journal, used) FIELD(ps_journal, words)
    END(ps_journal)
    BEGIN(ps_run)
    FIELD(ps_run, sequence) FIELD(ps_run, started) FIELD(ps_run, finished) FIELD(ps_run, action)
    FIELD(ps_run, censored)
    END(ps_run)
    BEGIN(ps_state)
    FIELD(ps_state, header) FIELD(ps_state, streams) FIELD(ps_state, slots_at)
    FIELD(ps_state, slot_bytes) FIELD(ps_state, undo_at) FIELD(ps_state, record)
    FIELD(ps_state, applied) FIELD(ps_state, journal) FIELD(ps_state, runs)
    END(ps_state)
    BEGIN(ps_frame)
    FIELD(ps_frame, sequence) FIELD(ps_frame, generation) FIELD(ps_frame, clock)
    FIELD(ps_frame, version) FIELD(ps_frame, kind) FIELD(ps_frame, dtype)
    FIELD(ps_frame, payload_bytes) FIELD(ps_frame, flags) FIELD(ps_frame, blocks)
    FIELD(ps_frame, batch) FIELD(ps_frame, samples) FIELD(ps_frame, rate_scale)
    FIELD(ps_frame, loss) FIELD(ps_frame, started) FIELD(ps_frame, finished) FIELD(ps_frame, squares)
    END(ps_frame)
    BEGIN(ps_block)
    FIELD(ps_block, tensor) FIELD(ps_block, form) FIELD(ps_block, rows)
    FIELD(ps_block, indices_at) FIELD(ps_block, values_at)
    END(ps_block)
    BEGIN(ps_ring)
    FIELD(ps_ring, header) FIELD(ps_ring, slots) FIELD(ps_ring, shards)
    FIELD(ps_ring, slot_bytes) FIELD(ps_ring, slots_at) FIELD(ps_ring, capacity)
    FIELD(ps_ring, head) FIELD(ps_ring, waits_slot) FIELD(ps_ring, waits_work)
    FIELD(ps_ring, hold) FIELD(ps_ring, wants) FIELD(ps_ring, heartbeat) FIELD(ps_ring, pulled)
    FIELD(ps_ring, work_tail) FIELD(ps_ring, left) FIELD(ps_ring, released) FIELD(ps_ring, work_head)
    FIELD(ps_ring, work_items) FIELD(ps_ring, tail)
    END(ps_ring)
    return all;
failed:
    Py_XDECREF(fields);
failed_all:
    Py_DECREF(all);
    return NULL;
}

PyMethodDef ps_layout_methods[] = {
    ENTRY(layout, "layout() -> {struct: (size, {field: (offset, size)})}"),
    {NULL, NULL, 0, NULL},
};
