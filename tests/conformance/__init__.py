"""What PyTorch's distributed autograd does and fails at: one suite for every driver.

Its behaviour was read in its documents and tests and seen on torch 2.13.0; the numbers
are exact. Each line below is a fact, and under it the tests that prove it here, where
`ids.x` is `test_x` in `test_ids.py`; `test_page.py` holds that they exist.

Ids and life
- 200 contexts have 200 ids; `id >> 48` is the worker's number:
    ids.200_contexts_have_200_ids_with_the_workers_number_on_top
    callers.ids_of_contexts_have_the_number_of_the_worker_that_opened_them
- The counter ends at 2^48 - 1, and then refuses:
    ids.the_counter_ends_at_2_to_the_48_less_1_and_then_refuses
- After a context ends, every use of its id fails on every worker that took part:
    ids.after_a_context_ends_every_use_of_it_fails_for_its_owner
    ids.after_a_context_ends_every_use_of_it_fails_on_all_who_took_part
    ids.after_a_context_ends_no_worker_holds_anything_of_it
    ids.nothing_is_left_where_messages_are_late_and_lost
- Each of 3 trainers in its own open context on one parameter server: none mixed:
    callers.three_trainers_on_one_parameter_server_have_three_gradients_none_mixed
    callers.trainers_beside_each_other_have_the_bits_that_each_has_alone
    ids.contexts_are_values_and_may_be_nested
- 60 contexts from concurrent callers on one worker: 126, 13, 27:
    callers.60_contexts_of_concurrent_callers_give_126_and_13_and_27_each

What forward records
- add on a remote worker, reply moved back: 1 send and 1 recv at each end:
    forward.an_add_elsewhere_has_one_send_and_one_recv_at_either_end
- Both inputs of its add come from the same recv:
    forward.both_inputs_of_the_add_come_from_the_same_recv
- Three hops: ends have 1 and 1, middles 2 and 2:
    forward.three_hops_have_one_of_each_at_the_ends_and_two_in_the_middle
    backward.a_hundred_round_trips_are_a_hundred_sends_and_2_to_the_100
- A leaf on the callee's own worker: one gradient there, none at the caller:
    forward.a_leaf_on_the_callees_own_worker_has_its_one_gradient_there
    backward.a_leaf_of_another_worker_is_handed_on_by_its_ref
- The remote function sees which arguments are tracked:
    forward.the_callee_sees_which_arguments_are_tracked
- Untracked arguments get no entry in the gradients:
    forward.untracked_arguments_get_no_entry_in_the_gradients
    forward.a_call_without_tracked_inputs_records_nothing_and_still_takes_part

Backward
- Local only, no remote call at all: all leaves have gradients:
    backward.without_any_remote_call_all_leaves_have_gradients
- Several roots are the backward of their sum: 3.5 and 1:
    backward.several_roots_are_the_backward_of_their_sum
- Round trips over 3 workers: 4131; 864, 1728, 54:
    backward.round_trips_over_three_workers_give_4131_and_864_1728_54
    backward.matrices_of_different_shapes_over_workers
    backward.each_gradient_has_the_dtype_of_its_leaf
- sum(t1 t2 t3 t4 t5): 1594323; 885735; 1240029:
    backward.a_product_of_products_gives_1594323_and_885735_1240029
- split into 5 parts, product of parts 0, 2, 4: 4 there, 0 elsewhere; 16:
    backward.a_split_whose_parts_0_2_4_are_multiplied_gives_4_there_and_0_elsewhere
- Unused arguments get an explicit zero; unused outputs are zeros to the vjp:
    backward.an_unused_argument_gets_an_explicit_zero
    backward.an_unused_output_is_a_zero_to_the_vjp
- A second pass in one context adds:
    backward.a_second_pass_in_one_context_adds
    backward.a_thousand_passes_over_one_hop_add_up
- Without `retain_graph` it is an error that says so:
    backward.a_second_pass_without_retain_graph_is_an_error_that_says_so
- Hooks: a function on a leaf's cotangent may replace it:
    hooks.a_function_on_a_leafs_cotangent_may_replace_it_once_when_it_is_complete
    hooks.a_function_that_returns_none_sees_the_cotangent_and_leaves_it
    hooks.several_on_one_leaf_are_chained_in_their_order
    hooks.an_intermediate_refs_complete_cotangent_may_be_replaced_where_it_lives
    hooks.a_hook_on_a_zero_is_called_with_zeros_and_may_replace_them
    hooks.a_hook_is_of_its_context_alone
    hooks.a_hook_that_raises_or_gives_another_shape_is_an_error_with_its_name
    hooks.an_untracked_ref_has_no_cotangent_to_hook_and_says_so
- Functions after accumulation, once each:
    hooks.a_function_after_accumulation_sees_this_pass_once_each_in_order
    hooks.a_function_after_accumulation_sees_what_the_cotangents_hooks_have_made
    hooks.what_a_function_after_accumulation_returns_changes_nothing
    hooks.what_a_function_after_accumulation_raises_backward_raises
- A function that multiplies if t2 is tracked and subtracts otherwise:
    forward.a_function_that_asks_whether_t2_is_tracked_sees_the_right_flag

Replicas
- DataParallel's ReduceAdd: gradients of replicas add up on the original's owner:
    replicas.reduce_add_over_workers_gives_one_sum_in_the_order_of_the_replicas
    replicas.reduce_add_has_one_bit_pattern_whatever_arrives_first
- DistributedDataParallel's all-reduce: all replicas get one sum:
    replicas.an_all_reduce_gives_each_the_same_sum_to_the_last_bit
    replicas.unequal_replicas_are_refused_on_every_driver
- torch.distributed.nn's gather, reduce-scatter and all-to-all, and their gradients:
    replicas.shares_are_gathered_summed_and_exchanged_in_the_order_of_workers
    replicas.gradients_of_exchanges_are_those_of_the_oracle
- DDP's programs, one on each worker, meet in collectives:
    collectives.four_collectives_give_each_member_the_same_bits
    collectives.shares_are_summed_and_exchanged_between_members
    collectives.replicas_that_train_in_loops_of_their_own_stay_equal
- A member that is absent, differs, dies or waits elsewhere is named to all who wait:
    collectives.a_member_that_returns_early_is_named_to_all_who_wait
    collectives.a_member_that_raises_is_the_error_and_others_have_named_it
    collectives.a_member_that_dies_is_the_error_and_others_have_named_it
    collectives.members_that_disagree_are_told_both_and_go_on
    collectives.crossed_groups_are_a_deadlock_that_names_who_waits_where
    collectives.what_one_process_cannot_name_to_another_is_an_error_and_no_loss

Programs at the same time
- Several programs run at once, with the oracle's gradients; errors in program order:
    tasks.programs_at_once_have_the_gradients_of_the_oracle
    tasks.two_programs_that_were_started_run_at_the_same_time
    tasks.errors_of_tasks_that_nobody_asked_for_are_raised_in_program_order

Errors
- Six wrong roots are six different messages:
    errors.no_roots_none_constant_leaf_not_scalar_unknown_context_are_six_messages
- An error in the backward of the second hop, with the path of workers:
    errors.an_error_in_the_backward_of_the_second_hop_brings_the_path_of_workers
    errors.a_function_that_raises_names_function_worker_call_site_and_its_own_line
    errors.an_exception_whose_str_raises_is_one_error_and_its_worker_goes_on
    errors.programs_that_call_each_other_for_ever_are_an_error_that_names_the_two
- 50 failing passes and then a good one; 0 live passes after each:
    errors.after_50_failing_passes_a_good_one_gives_what_one_good_pass_gives
    errors.a_pass_that_fails_without_retain_graph_spends_the_graph_and_says_so
- A worker that dies: an error at the caller within the deadline:
    errors.a_worker_that_dies_in_a_pass_is_told_in_time_and_the_others_go_on
    errors.a_worker_that_dies_in_forward_is_an_error_at_who_fetches_and_at_backward
    errors.a_pass_that_takes_longer_than_timeout_s_raises_with_what_is_owed

Optimizer
- One step on each owner, in parallel, errors named by owner:
    optimizer.a_step_is_one_message_to_each_owner_all_at_once
    optimizer.a_step_that_fails_on_one_owner_names_it_and_the_others_have_moved
    optimizer.a_step_with_an_owner_that_died_names_it_and_moves_nobody
- A parameter without a gradient does not move: 0.8 and 0.9:
    optimizer.a_parameter_without_a_gradient_in_this_context_does_not_move
    optimizer.a_parameter_that_is_left_out_keeps_its_momentum_too
- SGD 0.05 on two owners: gradients 9, weights 0.55:
    optimizer.sgd_on_two_owners_gives_gradients_9_and_weights_055
- Copies of leaves are leaves of their own:
    optimizer.a_copy_of_leaves_does_not_follow_their_steps_and_averages_them
- One optimizer for several trainers: all steps count, in one state:
    trainers.steps_of_trainers_at_once_all_count
    trainers.the_one_state_of_adam_has_counted_the_steps_of_all
    trainers.the_bits_of_a_trainers_step_are_those_of_mains_on_any_driver
    trainers.a_trainer_gives_gradients_of_its_own
    trainers.what_goes_by_name_is_stepped_by_name
    trainers.what_main_saves_afterwards_are_the_steps_of_all
    trainers.a_trainers_step_with_an_owner_that_died_names_the_step
    trainers.states_that_were_dropped_are_an_error_for_all_who_have_them
    trainers.where_no_optimizer_can_go_is_one_error_that_says_so
- Training that is saved and resumed:
    optimizer.training_resumed_on_any_placement_has_the_bits_of_training_that_went_on

Plans
- A step that is recorded is what its program does, and leaves nothing else:
    plans.random_programs_have_eagers_bits_and_fused_its_numbers
    plans.ten_steps_have_eagers_bits_beside_contexts_updates_and_fetches
    plans.no_update_of_trainers_with_a_plan_each_is_lost
    plans.a_step_leaves_nothing_but_leaves_and_their_states

Functions and state
- A function of a peer runs as Python on real arrays:
    python.a_function_that_runs_as_python_sees_real_arrays
    python.a_function_that_runs_as_python_and_has_no_name_is_refused_by_processes
- Buffers are state without gradients, and a hidden state outlives its context:
    python.untracked_leaves_and_kept_values_are_constants_everywhere
    python.programs_of_a_run_keep_and_return_values

Where it fails, and jdag does not
- Gradients differ from run to run: 1, 3, 10, 97, 100 patterns for K = 2 to 24:
    failing.k_parallel_calls_on_one_leaf_have_one_bit_pattern_in_100_runs
- It hangs for ever on a dropped reply, a stopped gradient, an integer, a log; it fails
  without a name on a nested dropped reply:
    failing.what_hangs_the_peer_has_the_right_gradients_under_smart
    failing.what_hangs_the_peer_ends_at_once_under_fast_with_its_culprit
- It fails on two losses of one context, one at a time:
    failing.two_losses_of_one_context_are_differentiated_one_at_a_time
    failing.two_losses_one_at_a_time_are_stuck_under_fast_on_the_other_ones_sends
- A failure between two visits of a worker leaves it a live pass for ever:
    failing.a_pass_that_fails_between_two_visits_of_a_worker_leaves_no_live_pass
- Other workers are not told of a failure:
    errors.every_participant_is_told_and_refuses_to_go_on
- Contexts whose owner died stay for ever:
    callers.the_contexts_of_a_caller_that_died_go_from_every_worker
- Zeros travel as dense arrays:
    failing.zeros_take_no_bytes_and_what_they_would_have_taken_is_counted
- Roots are scalar and local:
    failing.roots_may_be_on_any_worker_and_of_any_shape
- Functions and values travel as pickle:
    failing.neither_functions_nor_values_travel_as_pickle
"""
