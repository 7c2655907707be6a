"""A simulated run: the worker's own steps on a GPU that is not there."""
from __future__ import annotations

from typing import Any
import dataclasses, time, sys

import torch
from transformers import TrainerCallback, set_seed

from ftbench.rundir import RunDir
from ftbench.spec.experiment import Experiment
from ftbench.worker import methods, models, optimizations, trainer
from ftbench.worker.data.prepare import prepare
from ftbench.worker.tokenizer import build_tokenizer
from ftbench.worker.random_weights import _config
from ftbench.worker.simulate.gpu import simulated
from ftbench.worker.simulate.weights import Shape
from collections import deque
from pathlib import Path

class Watch(TrainerCallback):
    def __init__(self, mode):
        self.mode=mode; self.batches=deque(); self.grad_norm=None; self.step=0
    @property
    def position(self): return self.mode.tracker.phase
    @position.setter
    def position(self, v): self.mode.tracker.phase=v
    def micro_step(self, loss): self.batches.clear(); self.position="forward"
    def on_step_begin(self, args, state, control, **k):
        self.mode.tracker.mark(f"step {state.global_step+1}"); self.position="forward"
    def on_pre_optimizer_step(self,*a,**k): self.position="optimizer"
    def on_step_end(self,*a,**k): self.position="data"

def main(spec: Experiment, path):
    t0=time.time()
    run = RunDir(Path(path))
    config=_config(spec.model)
    vocab=config.get_text_config().vocab_size
    tok=build_tokenizer(vocab)
    data=prepare(spec,tok,vocab)
    t1=time.time()
    with simulated((9,0), 141*10**9) as mode:
        method=methods.load(spec.method.name)
        model=method.load(spec, Shape(config))
        mode.tracker.phase="setup"
        t2=time.time()
        set_seed(spec.train.seed)
        model.config.use_cache=False
        model=method.adapt(model,spec)
        for m in optimizations.modules().values(): m.apply(model,spec)
        watch=Watch(mode)
        loop=trainer.build(spec,run,model,tok,data,watch)
        from types import SimpleNamespace
        from contextlib import nullcontext
        loop.attach(watch, SimpleNamespace(within=lambda n: nullcontext()))
        if spec.optimizations.gradient_checkpointing == "selective":
            loop.add_callback(optimizations.load("gradient_checkpointing").Selective())
        t3=time.time()
        loop.train()
        t4=time.time()
    T=mode.tracker
    print("times prep %.1f load %.1f build %.1f train %.1f"%(t1-t0,t2-t1,t3-t2,t4-t3), len(T.storages), T.events)
    ev=[0]*(T.events)
    r=lambda b:-(-b//512)*512
    for s in T.storages:
        ev[s.born]+=r(s.bytes)
        if s.freed is not None: ev[s.freed]-=r(s.bytes)
    cur=0;curve=[]
    for e in ev: cur+=e;curve.append(cur)
    for (a,n),(b,_) in zip(T.marks,[*T.marks[1:],(T.events,"")]):
        seg=curve[a:b]; p=max(seg); i=a+seg.index(p)
        print(n, "peak %.4f end %.4f"%(p/2**30, curve[b-1]/2**30))
    alive=[s for s in T.storages if s.born<=i and (s.freed is None or s.freed>i)]
    from collections import Counter
    c=Counter(); n=Counter()
    for s in alive: k=(s.phase,s.operation,s.shape,s.dtype); c[k]+=r(s.bytes); n[k]+=1
    for k,v in c.most_common(30): print("%8.3f"%(v/2**30),n[k],k)
    born=[s for s in T.storages if s.born==i]; print(born)

if __name__=="__main__":
    import json
    v=json.load(open(sys.argv[1]))
    spec=Experiment.model_validate({k:v[k] for k in Experiment.model_fields})
    upd={"train":spec.train.model_copy(update={"max_steps":2})}
    main(spec.model_copy(update=upd), "/tmp/simrun")
