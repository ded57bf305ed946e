//! KV blocks as vLLM keeps them: a free list in order of release, those that hold nothing of use before all others, and
//! contents that stay findable until the block is handed out again.

use std::collections::VecDeque;

/// What a full block holds: a block of some shared prefix, or a block that only one request has.
#[derive(Clone, Copy, PartialEq)]
pub enum Content {
    Shared { hash: u64, part: u32 },
    Own { request: usize, block: usize },
}

#[derive(Clone, Default)]
struct Block {
    users: u32,
    content: Option<Content>,
    published: u64,
}

#[derive(Clone)]
pub struct Pool {
    blocks: Vec<Block>,
    free: VecDeque<usize>,
    published: u64,
}

impl Pool {
    pub fn new(blocks: usize) -> Self {
        Self { blocks: vec![Block::default(); blocks], free: (0..blocks).collect(), published: 0 }
    }

    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    pub fn free(&self) -> usize {
        self.free.len()
    }

    pub fn users(&self, block: usize) -> u32 {
        self.blocks[block].users
    }

    pub fn is_free(&self, block: usize) -> bool {
        self.blocks[block].users == 0
    }

    /// The block that holds this content, the one published first if several do.
    pub fn find(&self, content: Content) -> Option<usize> {
        let holds = |&block: &usize| self.blocks[block].content == Some(content);
        (0..self.blocks.len()).filter(holds).min_by_key(|&block| self.blocks[block].published)
    }

    /// One more user of a block that holds something useful.
    pub fn share(&mut self, block: usize) {
        if self.blocks[block].users == 0 {
            self.free.retain(|&other| other != block);
        }
        self.blocks[block].users += 1;
    }

    pub fn allocate(&mut self) -> usize {
        let block = self.free.pop_front().expect("the caller saw that one is free");
        assert_eq!(self.blocks[block].users, 0);
        self.blocks[block] = Block { users: 1, ..Block::default() };
        block
    }

    /// Makes a full block findable.
    pub fn publish(&mut self, block: usize, content: Content) {
        if self.blocks[block].content.is_none() {
            self.published += 1;
            self.blocks[block].content = Some(content);
            self.blocks[block].published = self.published;
        }
    }

    /// What is to become the block's content is not complete.
    pub fn withdraw(&mut self, block: usize) {
        self.blocks[block].content = None;
    }

    /// Gives a request's blocks back, the last one first.
    pub fn release(&mut self, blocks: &[usize]) {
        for &block in blocks.iter().rev() {
            self.blocks[block].users -= 1;
            match (self.blocks[block].users, self.blocks[block].content) {
                (0, None) => self.free.push_front(block),
                (0, Some(_)) => self.free.push_back(block),
                _ => {}
            }
        }
    }
}
